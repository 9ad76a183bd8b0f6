"""Writes SPIR-V: a module with one compute entry point, instruction by instruction. Does not depend on TVM.

In: calls of `Asm`'s methods. Out: `Asm.binary`. Types are named "bool", "i32", "f16", ... or ("vec", name, n). Integer
types have no sign; instructions do. Each type and constant is declared once. A pure instruction is not repeated where
its value is already known.
"""

import struct
from contextlib import contextmanager

from mlc_amd.compiler.codegen.spirv import opcodes
from mlc_amd.compiler.codegen.spirv.opcodes import DECORATIONS, GLSL, OP, STORAGE, UNTYPED

MAGIC, VERSION = 0x07230203, 0x00010500  # SPIR-V 1.5, the version that Vulkan 1.2 accepts
PHYSICAL_64, GLSL450, VULKAN, GL_COMPUTE, LOCAL_SIZE = 5348, 1, 3, 5, 17
UNROLL, DONT_UNROLL = 1, 2  # loop control hints
FLOATS = {"f16": ("<H", "<e"), "f32": ("<I", "<f")}
TYPE_CAPABILITIES = {"f16": "Float16", "i64": "Int64"}
STORAGE_CAPABILITIES = {
    "f16": "StorageBuffer16BitAccess",
    "i16": "StorageBuffer16BitAccess",
    "i8": "StorageBuffer8BitAccess",
}


def instruction(op, *words):
    """The words of an instruction."""
    return [(len(words) + 1) << 16 | OP[op], *words]


def string(text):
    """A literal string as words."""
    data = text.encode() + b"\0"
    count = -(-len(data) // 4)
    return list(struct.unpack(f"<{count}I", data.ljust(count * 4, b"\0")))


class Asm:
    """The module that is being written. Values are ids (ints)."""

    def __init__(self):
        self.bound, self.capabilities, self.interface = 1, {"Shader"}, []
        self.decorations, self.globals, self.locals, self.body = [], [], [], []
        self.known = {}  # module level: (instruction, operands) of a type or constant -> its id
        self.types, self.constants = {}, {}  # caches: type name -> id, (type, value) of a constant -> id
        self.scopes = [{}]  # for each open region: pure instruction -> its id
        self.label = None  # of the block that is being filled
        self.glsl = self.new()

    def new(self):
        """A new id."""
        self.bound += 1
        return self.bound - 1

    # ---- module level

    def unique(self, op, *args):
        """A type or constant, declared once."""
        key = (op, *args)
        if key not in self.known:
            made = self.known[key] = self.new()
            self.globals += instruction(op, made, *args) if op in UNTYPED else instruction(op, args[0], made, *args[1:])
        return self.known[key]

    def type(self, name):
        """The id of a type for arithmetic. name: a type's name, or already an id."""
        if isinstance(name, int):
            return name
        if (made := self.types.get(name)) is None:
            made = self.types[name] = self._type(name)
        return made

    def _type(self, name):
        if isinstance(name, tuple):
            return self.unique("TypeVector", self.type(name[1]), name[2])
        if name in ("void", "bool"):
            return self.unique("TypeVoid" if name == "void" else "TypeBool")
        if name in TYPE_CAPABILITIES:
            self.capabilities.add(TYPE_CAPABILITIES[name])
        return self._number(name)

    def storage_type(self, name):
        """The id of a type that only buffers hold, so that it needs no capability for arithmetic."""
        if name not in STORAGE_CAPABILITIES:
            return self.type(name)
        self.capabilities.add(STORAGE_CAPABILITIES[name])
        return self._number(name)

    def _number(self, name):
        bits = int(name[1:])
        return self.unique("TypeInt", bits, 0) if name[0] == "i" else self.unique("TypeFloat", bits)

    def pointer(self, storage, pointee):
        """A pointer type."""
        return self.unique("TypePointer", STORAGE[storage], pointee)

    def const(self, name, value):
        """A constant of a scalar type. Integers wrap around; floats are rounded."""
        key = name, value or str(value)  # 0.0 == -0.0
        if (made := self.constants.get(key)) is None:
            made = self.constants[key] = self._const(name, value)
        return made

    def _const(self, name, value):
        if name == "bool":
            return self.unique("ConstantTrue" if value else "ConstantFalse", self.type(name))
        if name in FLOATS:
            word, number = FLOATS[name]
            return self.unique("Constant", self.type(name), *struct.unpack(word, struct.pack(number, value)))
        bits = int(name[1:])
        value = int(value) & ((1 << bits) - 1)
        return self.unique("Constant", self.type(name), *([value & 0xFFFFFFFF, value >> 32] if bits == 64 else [value]))

    def array(self, element, count):
        """An array type."""
        return self.unique("TypeArray", element, self.const("i32", count))

    def array_in_memory(self, element, stride, count=None):
        """The type of an array in a buffer. count: its length; None for a runtime array."""
        key = ("memory", element, count)
        if key not in self.known:
            made = self.new()
            if count is None:
                self.globals += instruction("TypeRuntimeArray", made, element)
            else:
                self.globals += instruction("TypeArray", made, element, self.const("i32", count))
            self.known[key] = made
            self.decorate(made, "ArrayStride", stride)
        return self.known[key]

    def block(self, members, offsets, *decorations):
        """A struct type in memory, with members at these offsets. decorations: of every member."""
        key = ("block", tuple(members), tuple(offsets), decorations)
        if key not in self.known:
            made = self.known[key] = self.new()
            self.globals += instruction("TypeStruct", made, *members)
            self.decorate(made, "Block")
            for i, offset in enumerate(offsets):
                self.decorations += instruction("MemberDecorate", made, i, DECORATIONS["Offset"], offset)
                for name in decorations:
                    self.decorations += instruction("MemberDecorate", made, i, DECORATIONS[name])
        return self.known[key]

    def decorate(self, target, name, *args):
        self.decorations += instruction("Decorate", target, DECORATIONS[name], *args)

    def variable(self, storage, pointee):
        """A pointer to a new variable of type `pointee`."""
        made, pointer = self.new(), self.pointer(storage, pointee)
        words = instruction("Variable", pointer, made, STORAGE[storage])
        if storage == "Function":
            self.locals += words
        else:
            self.globals += words
            self.interface.append(made)
        return made

    def builtin(self, name: str, of: str | tuple = "i32"):
        """The value of a built-in input variable."""
        if ("builtin", name) not in self.known:
            made = self.known["builtin", name] = self.variable("Input", self.type(of))
            self.decorate(made, "BuiltIn", opcodes.BUILTINS[name])
        return self.op("Load", of, self.known["builtin", name])

    # ---- the function's body

    def emit(self, op, *words):
        """An instruction without a result."""
        self.body += instruction(op, *words)

    def op(self, op, of, *args, pure=True):
        """The result of an instruction; `of` is the result's type. A pure instruction is not repeated where its value
        is already known."""
        of = self.type(of)
        key = (op, of, *args)
        if pure:
            for scope in self.scopes:
                if key in scope:
                    return scope[key]
        made = self.new()
        self.emit(op, of, made, *args)
        if pure:
            self.scopes[-1][key] = made
        return made

    def glsl_op(self, name, of, *args):
        """A function of GLSL.std.450."""
        return self.op("ExtInst", of, self.glsl, GLSL[name], *args)

    def begin(self, label):
        """Starts a block."""
        self.emit("Label", label)
        self.label = label

    @contextmanager
    def region(self, label):
        """Starts a block. Values that are computed in the region are not known after it."""
        self.begin(label)
        self.scopes.append({})
        yield
        self.scopes.pop()

    def selection(self, condition, then, otherwise=None):
        """An if statement. Calls `then` and `otherwise` to fill the branches. Returns (the callable's result, label of
        the branch's last block) for each branch."""
        first, second, merge = self.new(), self.new() if otherwise else None, self.new()
        self.emit("SelectionMerge", merge, 0)
        self.emit("BranchConditional", condition, first, second or merge)
        results = []
        for label, fill in ((first, then), (second, otherwise)):
            if fill:
                with self.region(label):
                    results.append((fill(), self.label))
                    self.emit("Branch", merge)
        self.begin(merge)
        return results

    def loop(self, of, start, extent, body, hint=0):
        """for (i = start; i < start + extent; i++) body(i), with signed comparison. hint: UNROLL, DONT_UNROLL or 0."""
        header, test, inside, following, merge, i, after = (self.new() for _ in range(7))
        end, one = self.op("IAdd", of, start, extent), self.const(of, 1)
        before = self.label
        self.emit("Branch", header)
        self.begin(header)
        self.emit("Phi", self.type(of), i, start, before, after, following)
        self.emit("LoopMerge", merge, following, hint)
        self.emit("Branch", test)
        self.begin(test)
        self.emit("BranchConditional", self.op("SLessThan", "bool", i, end, pure=False), inside, merge)
        with self.region(inside):
            body(i)
            self.emit("Branch", following)
        self.begin(following)
        self.emit("IAdd", self.type(of), after, i, one)
        self.emit("Branch", header)
        self.begin(merge)

    def loop_while(self, condition, body):
        """while (condition()) body()."""
        header, test, inside, following, merge = (self.new() for _ in range(5))
        self.emit("Branch", header)
        self.begin(header)
        self.emit("LoopMerge", merge, following, 0)
        self.emit("Branch", test)
        with self.region(test):
            self.emit("BranchConditional", condition(), inside, merge)
            with self.region(inside):
                body()
                self.emit("Branch", following)
        self.begin(following)
        self.emit("Branch", header)
        self.begin(merge)

    def binary(self, block, name="main") -> bytes:
        """The bytes of the finished module. Ends the function. block: the workgroup's size (x, y, z)."""
        main, entry, void = self.new(), self.new(), self.type("void")
        function = self.unique("TypeFunction", void)
        vulkan = "VulkanMemoryModel" in self.capabilities
        extensions = sorted(opcodes.EXTENSIONS[name] for name in self.capabilities & opcodes.EXTENSIONS.keys())
        words = [MAGIC, VERSION, 0, self.bound, 0]
        for capability in sorted(self.capabilities):
            words += instruction("Capability", opcodes.CAPABILITIES[capability])
        for extension in extensions:
            words += instruction("Extension", *string(extension))
        words += instruction("ExtInstImport", self.glsl, *string("GLSL.std.450"))
        words += instruction("MemoryModel", PHYSICAL_64, VULKAN if vulkan else GLSL450)
        words += instruction("EntryPoint", GL_COMPUTE, main, *string(name), *self.interface)
        words += instruction("ExecutionMode", main, LOCAL_SIZE, *block)
        words += self.decorations + self.globals
        words += instruction("Function", void, main, 0, function) + instruction("Label", entry)
        words += self.locals + self.body + instruction("Return") + instruction("FunctionEnd")
        return struct.pack(f"<{len(words)}I", *words)
