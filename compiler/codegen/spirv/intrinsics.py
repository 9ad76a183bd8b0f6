"""Converts calls: TIR's own functions, LLVM intrinsics of AMD's vector unit, and the externs "vk.*" of
schedules/gpu/base/device.py. An extern "vk.dot4" is the method vk_dot4.

Externs (a word is a 32-bit scalar):
    vk.dot4(a, b)                   int32: the sum of the four products of the signed bytes of two words
    vk.lookup(x, a, b, ..)          uint32: byte i is the byte of the constants a, b, .. whose number is byte i of x.
                                    One, two or four constants, so two, three or four bits of each byte of x count
    vk.shuffle_xor(x, mask)         the word of lane number (this lane's number xor mask); mask is constant
    vk.shuffle(x, lane)             the word of lane number `lane`
    vk.broadcast(x, lane)           the word of lane number `lane`, which must be the same in all lanes
    vk.broadcast_first(x)           the word of the first active lane; x must be the same in all lanes
    vk.reduce_add, _max, _min (x)   the reduction over all lanes of the subgroup
    vk.lane()                       int32: this lane's number
    vk.any(x)                       bool: whether a bool is true in any lane
    vk.wave_barrier()               barrier of the subgroup; afterwards all its lanes see its writes to shared memory
    vk.volatile_load(address)       int64x2: loads two 64-bit words of a parameter from memory; neither word is torn
    vk.volatile_store(address, x)   stores two 64-bit words in the same way
    vk.memory_barrier()             no access to buffers is moved across it, as seen by the whole device
"""

from tvm import tirx
from tvm.target.codegen import llvm_get_intrinsic_name

from mlc_amd.compiler.codegen.spirv import opcodes
from mlc_amd.compiler.codegen.spirv.memory import Memory
from mlc_amd.compiler.codegen.spirv.types import Type, Unsupported, has_load, kind, parse, size

INT8 = Type("int", 8, 1)
WORDS = ("vec", "i64", 2)  # the type of a volatile access
LLVM_MATH = {
    "llvm.fma": "Fma", "llvm.maxnum": "NMax", "llvm.minnum": "NMin", "llvm.rint": "RoundEven", "llvm.fabs": "FAbs",
    "llvm.sqrt": "Sqrt", "llvm.floor": "Floor", "llvm.ceil": "Ceil", "llvm.trunc": "Trunc", "llvm.amdgcn.exp2": "Exp2",
    "llvm.amdgcn.rsq": "InverseSqrt", "llvm.amdgcn.sqrt": "Sqrt", "llvm.amdgcn.log": "Log2",
}  # fmt: skip
PACKED = {"Fma", "NMax", "NMin"}  # functions that take two float16 at a time
# LLVM name without the type suffix -> method
LLVM = {
    "llvm.ctpop": "call_popcount",
    "llvm.amdgcn.rcp": "reciprocal",
    "llvm.amdgcn.perm": "byte_permute",
    "llvm.amdgcn.sched.barrier": "nothing",
    "llvm.amdgcn.readfirstlane": "vk_broadcast_first",
    "llvm.amdgcn.readlane": "vk_broadcast",
    "llvm.amdgcn.ds.bpermute": "shuffle_bytes",
    "llvm.amdgcn.mbcnt.lo": "vk_lane",
    "llvm.amdgcn.mbcnt.hi": "vk_lane",
}
LLVM_CALLS, EXTERN_CALLS = ("call_llvm_intrin", "call_llvm_pure_intrin"), ("call_extern", "call_pure_extern")
NAMED = LLVM_CALLS + EXTERN_CALLS


def name_of(call) -> str:
    """The name of the function that is called: of an LLVM intrinsic, an extern, or a TIR function (without prefix)."""
    op = call.op.name.split(".", 1)[1]
    return _name(call.args[0]) if op in NAMED else op


def _name(argument):
    """The name in the first argument of a call: a string for an extern, a number for an LLVM intrinsic."""
    return llvm_get_intrinsic_name(int(argument)) if isinstance(argument, tirx.IntImm) else str(argument.value)


class Intrinsics(Memory):
    """Part of the emitter: calls."""

    def expr_Call(self, e):
        op, name = e.op.name.split(".", 1)[1], name_of(e)
        args = list(e.args)[1 if op in NAMED else 0 :]
        glsl = LLVM_MATH.get(name) if op in LLVM_CALLS else None
        if glsl:
            ty = parse(e.ty)
            if glsl in PACKED and (ty.code, ty.bits) == ("float", 16) and ty.lanes % 2 == 0 and self.profile.float16:
                return self.packed_halves(lambda of, *x: self.asm.glsl_op(glsl, of, *x), ty, *args)
            return self.map(lambda *x: self.asm.glsl_op(glsl, self.register(ty), *x), ty, *args)
        if op in EXTERN_CALLS:
            method = name.replace(".", "_") if name.startswith(("vk.", "fragment_")) else ""
        else:
            method = LLVM.get(name, "") if op in LLVM_CALLS else f"call_{name}"
        if not hasattr(self, method):
            raise Unsupported(f"call of {name}")
        return getattr(self, method)(e, *args)

    # ---- TIR's own

    def call_tvm_storage_sync(self, e, scope, *_):
        if str(scope.value) != "shared":
            raise Unsupported(f"a barrier over {scope.value} memory")
        self.barrier()

    def barrier(self):
        """A barrier of the workgroup. Afterwards all its threads see its writes to shared memory."""
        semantics = opcodes.ACQUIRE_RELEASE | opcodes.WORKGROUP_MEMORY
        workgroup = self.int_const(opcodes.WORKGROUP)
        self.asm.emit("ControlBarrier", workgroup, workgroup, self.int_const(self.ordering(semantics)))

    def ordering(self, semantics):
        """Memory semantics of a barrier. The Vulkan memory model also requires that writes are made available and
        visible."""
        return semantics | (opcodes.MAKE_AVAILABLE | opcodes.MAKE_VISIBLE if self.vulkan_model else 0)

    def call_if_then_else(self, e, condition, x, y):
        """An arm that loads is only evaluated if it is taken: it may load out of bounds."""
        ty = parse(e.ty)
        register = self.register(ty)
        if not (has_load(x) or has_load(y)):
            return self.map(lambda c, u, v: self.asm.op("Select", register, c, u, v), ty, condition, x, y)
        if parse(condition.ty).lanes > 1:
            raise Unsupported("if_then_else with a vector as condition of loads")
        arms = (lambda: self.lanes(x, ty.lanes)), (lambda: self.lanes(y, ty.lanes))
        (first, first_end), (second, second_end) = self.asm.selection(self.value(condition), *arms)
        out = [
            self.asm.op("Phi", register, u, first_end, v, second_end, pure=False)
            for u, v in zip(first, second, strict=True)
        ]
        return out if ty.lanes > 1 else out[0]

    def call_likely(self, e, x):
        return self.value(x)

    def call_reinterpret(self, e, x):
        source, target = parse(x.ty), parse(e.ty)
        if source.bits * source.lanes != target.bits * target.lanes:
            raise Unsupported(f"reinterpretation of {x.ty} as {e.ty}")
        out = self.unpack(self.pack(self.lanes(x, source.lanes), source), target)[: target.lanes]
        return out if target.lanes > 1 else out[0]

    def call_popcount(self, e, x):
        ty = parse(e.ty)
        if ty.bits != 32:
            raise Unsupported(f"popcount of {e.ty}")
        return self.map(lambda u: self.asm.op("BitCount", "i32", u), ty, x)

    def call_vectorlow(self, e, x):
        return self.value(x)[: parse(e.ty).lanes]

    def call_vectorhigh(self, e, x):
        return self.value(x)[-parse(e.ty).lanes :]

    # ---- memory that workgroups share

    def call_atomic_add(self, e, address, value):
        """Returns the value before the addition. int32 or uint32, in a parameter or a shared buffer. It does not order
        other accesses: `vk_memory_barrier` and barriers do."""
        load, ty = address.args[0], parse(e.ty)
        array = self.arrays.get(load.source)
        if ty.bits != 32 or ty.code == "float" or (array and array.storage != "Workgroup"):
            raise Unsupported(f"atomic addition of {e.ty} in a {array.storage if array else 'global'} buffer")
        if array:
            pointer, scope = self.element(array, self.value(load.indices[0])), self.int_const(opcodes.WORKGROUP)
        else:
            pointer, scope = self.pointer(load.source, "i32", load.indices[0], 0, 1), self.device_scope()
        relaxed = self.int_const(opcodes.RELAXED)
        return self.asm.op("AtomicIAdd", "i32", pointer, scope, relaxed, self.value(value), pure=False)

    def vk_memory_barrier(self, e):
        semantics = self.ordering(opcodes.ACQUIRE_RELEASE | opcodes.BUFFER_MEMORY)
        self.asm.emit("MemoryBarrier", self.device_scope(), self.int_const(semantics))

    def vk_volatile_load(self, e, address):
        pair = self.asm.op("Load", WORDS, *self._volatile(address), pure=False)
        return [self.asm.op("CompositeExtract", "i64", pair, i) for i in (0, 1)]

    def vk_volatile_store(self, e, address, pair):
        pointer, *operands = self._volatile(address)
        self.asm.emit("Store", pointer, self.asm.op("CompositeConstruct", WORDS, *self.value(pair)), *operands)

    def _volatile(self, address):
        """(pointer to two 64-bit words of a parameter, *memory operands of the access). Words have 64 bits because
        drivers may load the components of a vector one by one, but do not tear a component."""
        load = address.args[0]
        index = self.analyzer.simplify(load.indices[0])
        if self.vulkan_model or parse(load.ty).bits != 64 or self.known_multiple(index, 0) % 2:
            raise Unsupported("volatile access with cooperative matrices, or to other than aligned pairs of int64")
        pointer = self.pointer(load.source, WORDS, index, 0, 2, volatile=True)
        return pointer, opcodes.VOLATILE | opcodes.ALIGNED, size(WORDS)

    # ---- arithmetic

    def nothing(self, e, *_):
        return None

    def reciprocal(self, e, x):
        return self.asm.op("FDiv", "f32", self.asm.const("f32", 1.0), self.value(x))

    def byte_permute(self, e, high, low, selector):
        """v_perm_b32, without selectors 8 to 11 (signs): byte i of the result is byte number selector[i] of the eight
        bytes low, high; it is zero if selector[i] >= 12."""
        if not isinstance(selector, tirx.IntImm):
            return self._permute_by_value(self.value(high), self.value(low), self.value(selector))
        asm, words = self.asm, (self.value(low), self.value(high))
        total = None
        for i in range(4):
            number = int(selector) >> 8 * i & 255
            if number >= 12:
                continue
            if number >= 8:
                raise Unsupported(f"llvm.amdgcn.perm with selector {int(selector):#x}")
            byte = self._moved_byte(words[number // 4], number % 4, i)
            total = byte if total is None else asm.op("BitwiseOr", "i32", total, byte)
        return self.int_const(0) if total is None else total

    def _moved_byte(self, word, source, target):
        """A word with byte `source` of `word` at the place of byte `target`, and zeros elsewhere."""
        asm, distance = self.asm, 8 * (source - target)
        if distance:
            op = "ShiftRightLogical" if distance > 0 else "ShiftLeftLogical"
            word = asm.op(op, "i32", word, self.int_const(abs(distance)))
        return asm.op("BitwiseAnd", "i32", word, self.int_const(0xFF << 8 * target))

    def _permute_by_value(self, high, low, selector):
        asm, const = self.asm, self.int_const
        out = None
        for i in range(4):
            which = asm.op("BitFieldUExtract", "i32", selector, const(8 * i), const(3))
            is_high = asm.op("UGreaterThan", "bool", which, const(3))
            word = asm.op("Select", "i32", is_high, high, low)
            place = asm.op("ShiftLeftLogical", "i32", asm.op("BitwiseAnd", "i32", which, const(3)), const(3))
            byte = asm.op("BitFieldUExtract", "i32", word, place, const(8))
            out = byte if out is None else asm.op("BitFieldInsert", "i32", out, byte, const(8 * i), const(8))
        return out

    def vk_lookup(self, e, x, *words):
        """A binary search in all four bytes at the same time: each bit of the indices halves the candidates."""
        asm, const, x = self.asm, self.int_const, self.value(x)
        table = b"".join(int(word).to_bytes(4, "little") for word in words)
        found = [const(int.from_bytes(bytes([byte] * 4), "little", signed=True)) for byte in table]
        for bit in range(len(table).bit_length() - 1):
            ones = asm.op("BitwiseAnd", "i32", asm.op("ShiftRightLogical", "i32", x, const(bit)), const(0x01010101))
            # 255 in each byte whose bit is set
            mask = asm.op("ISub", "i32", asm.op("ShiftLeftLogical", "i32", ones, const(8)), ones)
            pairs = zip(found[::2], found[1::2], strict=True)
            found = [
                asm.op("BitwiseXor", "i32", a, asm.op("BitwiseAnd", "i32", asm.op("BitwiseXor", "i32", a, b), mask))
                for a, b in pairs
            ]
        return found[0]

    def vk_dot4(self, e, a, b):
        asm, (a, b) = self.asm, (self.word(a), self.word(b))
        if self.profile.dot:
            asm.capabilities |= {"DotProduct", "DotProductInput4x8BitPacked"}
            return asm.op("SDot", "i32", a, b, 0)  # 0: four packed bytes
        products = [
            asm.op("IMul", "i32", x, y) for x, y in zip(self.unpack([a], INT8), self.unpack([b], INT8), strict=True)
        ]
        first, second = (asm.op("IAdd", "i32", *pair) for pair in (products[:2], products[2:]))
        return asm.op("IAdd", "i32", first, second)

    def word(self, e):
        """The bits of a 32-bit scalar or of four bytes, as an id. For a reinterpreted word: that word."""
        ty = parse(e.ty)
        if kind(e) == "Call" and name_of(e) == "reinterpret" and parse(e.args[0].ty)[1:] == (32, 1):
            return self.word(e.args[0])
        (word,) = self.pack(self.lanes(e, ty.lanes), ty)
        return word
