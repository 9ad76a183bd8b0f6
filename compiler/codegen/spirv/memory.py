"""Emits loads and stores: of parameters by 64-bit addresses, of shared and local arrays as variables.

Four rules make AMD's compiler use its best addressing modes, and cost nothing on other GPUs:
1. address = base + zext(offset that is uniform in the subgroup) + zext(offset of the lane) + constant, in bytes, where
every term is provably >= 0
2. each access states its actual alignment
3. a parameter that is only read is a pointer to a Block whose member is NonWritable, so that loads may be moved across
stores, and may be scalar loads
4. a load that must not always happen is guarded by control flow (`if_then_else` in intrinsics.py)
"""

import math
from typing import Any, NamedTuple

import tvm
from tvm import tirx

from mlc_amd.compiler.codegen.lower import bytes_of
from mlc_amd.compiler.codegen.spirv import opcodes
from mlc_amd.compiler.codegen.spirv.expressions import Expressions
from mlc_amd.compiler.codegen.spirv.types import FRAGMENTS, Unsupported, contains, kind, parse, scope, size, storage

UNITS = (128, 64, 32)  # bits of the vectors that one instruction loads or stores
ALIGNMENT = 16  # the largest alignment that instructions use, bytes; parameters are aligned to it
ARRAYS = {"local": "Function", "shared": "Workgroup", "shared.wave": "Workgroup"}  # scopes of arrays
# calls whose value depends only on their arguments
PLAIN = {
    "shift_left", "shift_right", "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not", "reinterpret", "likely",
    "if_then_else",
}  # fmt: skip


class Array(NamedTuple):
    """A shared or local buffer. unit: the type of an element, ("vec", "i32", n) for buffers of vectors."""

    variable: int
    storage: str
    unit: object


class Memory(Expressions):
    """Part of the emitter: loads and stores."""

    # ---- arrays

    def stmt_AllocBuffer(self, s):
        buffer, asm = s.buffer, self.asm
        if scope(buffer) in FRAGMENTS:
            self.fragments[buffer] = {}
            return
        ty, count = parse(buffer.dtype), math.prod(int(extent) for extent in buffer.shape)
        if scope(buffer) not in ARRAYS:
            raise Unsupported(f"a buffer in scope {scope(buffer)}")
        if ty.lanes > 1:
            words = ty.bits * ty.lanes // 32
            if scope(buffer) == "local" or words not in (1, 2, 4):
                raise Unsupported(f"a {scope(buffer)} buffer of {buffer.dtype}")
            unit = "i32" if words == 1 else ("vec", "i32", words)
        else:
            unit = self.register(ty)
        variable = asm.variable(ARRAYS[scope(buffer)], asm.array(asm.type(unit), count))
        self.arrays[buffer] = Array(variable, ARRAYS[scope(buffer)], unit)
        if ARRAYS[scope(buffer)] == "Workgroup":
            self.lds += count * (4 if unit == "bool" else size(unit))

    def element(self, array, index):
        """A pointer to an element of an Array."""
        return self.asm.op(
            "AccessChain", self.asm.pointer(array.storage, self.asm.type(array.unit)), array.variable, index
        )

    def order(self, array):
        """The memory operands of an access to an Array. The Vulkan memory model needs to know what barriers order."""
        return (opcodes.NON_PRIVATE,) if array.storage == "Workgroup" and self.vulkan_model else ()

    def lane_indices(self, index):
        """The index of each lane of an index expression."""
        if kind(index) != "Ramp":
            value = self.value(index)
            return value if isinstance(value, list) else [value]
        base, stride = self.value(index.base), index.stride

        def distance(k):
            if isinstance(stride, tirx.IntImm):
                return self.int_const(int(stride) * k)
            return self.asm.op("IMul", "i32", self.value(stride), self.int_const(k))

        return [base, *(self.asm.op("IAdd", "i32", base, distance(k)) for k in range(1, int(index.lanes)))]

    # ---- loads and stores

    def stmt_BufferStore(self, s):
        if getattr(s, "predicate", None) is not None or len(s.indices) != 1:
            raise Unsupported("a store with a predicate or several indices")
        value, index, ty = self.value(s.value), self.analyzer.simplify(s.indices[0]), parse(s.buffer.dtype)
        lanes = value if isinstance(value, list) else [value]
        if s.buffer in self.arrays:
            self._store_array(self.arrays[s.buffer], index, lanes, ty)
            return
        base, stride, step = self.ramp(index, ty)
        for k in range(0, len(lanes), step):
            if step == 1:
                unit = storage(ty)
                stored = self.to_storage(lanes[k], ty, unit)
            else:
                words = self.pack(lanes[k : k + step], ty)
                unit = "i32" if len(words) == 1 else ("vec", "i32", len(words))
                stored = words[0] if len(words) == 1 else self.asm.op("CompositeConstruct", unit, *words)
            pointer = self.pointer(s.buffer, unit, base, k * stride, step)
            self.asm.emit("Store", pointer, stored, *self.operands(s.buffer, base, k * stride, ty, store=True))

    def _store_array(self, array, index, lanes, ty):
        if ty.lanes > 1:
            words = self.pack(lanes, ty)
            lanes = words if len(words) == 1 else [self.asm.op("CompositeConstruct", array.unit, *words)]
        for place, lane in zip(self.lane_indices(index), lanes, strict=True):
            self.asm.emit("Store", self.element(array, place), lane, *self.order(array))

    def expr_TensorLoad(self, e):
        if getattr(e, "predicate", None) is not None or len(e.indices) != 1:
            raise Unsupported("a load with a predicate or several indices")
        buffer, index, asm = e.source, self.analyzer.simplify(e.indices[0]), self.asm
        ty, lanes = parse(buffer.dtype), parse(e.ty).lanes
        if buffer in self.arrays:
            return self._load_array(self.arrays[buffer], index, lanes, ty)
        base, stride, step = self.ramp(index, ty)
        if step > 1:
            return self.unpack(self.load_words(buffer, index, ty), ty)
        out = []
        for k in range(lanes):
            pointer = self.pointer(buffer, storage(ty), base, k * stride, 1)
            operands = self.operands(buffer, base, k * stride, ty)
            loaded = asm.op("Load", asm.storage_type(storage(ty)), pointer, *operands, pure=self.read_only(buffer))
            out.append(self.from_storage(loaded, ty))
        return out if lanes > 1 else out[0]

    def _load_array(self, array, index, lanes, ty):
        asm, order = self.asm, self.order(array)
        if ty.lanes > 1:
            loaded = asm.op("Load", array.unit, self.element(array, self.value(index)), *order, pure=False)
            parts = isinstance(array.unit, tuple)
            return self.unpack(
                [asm.op("CompositeExtract", "i32", loaded, k) for k in range(array.unit[2])] if parts else [loaded], ty
            )
        out = [
            asm.op("Load", array.unit, self.element(array, place), *order, pure=False)
            for place in self.lane_indices(index)
        ]
        return out if lanes > 1 else out[0]

    def load_words(self, buffer, index, ty):
        """The 32-bit words of a ramp in a parameter. `ramp` must have found a unit of several elements."""
        words, (base, _, step) = [], self.ramp(index, ty)
        count = step * ty.bits // 32
        unit = "i32" if count == 1 else ("vec", "i32", count)
        for k in range(0, int(index.lanes), step):
            pointer, operands = self.pointer(buffer, unit, base, k, step), self.operands(buffer, base, k, ty)
            loaded = self.asm.op("Load", unit, pointer, *operands, pure=self.read_only(buffer))
            words += (
                [loaded] if count == 1 else [self.asm.op("CompositeExtract", "i32", loaded, j) for j in range(count)]
            )
        return words

    def ramp(self, index, ty):
        """(base, stride, step) of an index into a parameter. step: number of elements in the widest aligned unit into
        which the index can be divided; 1 if elements must be accessed one by one."""
        if ty.lanes > 1:
            raise Unsupported("a parameter with vectors as elements")
        if kind(index) != "Ramp":
            if parse(index.ty).lanes > 1:
                raise Unsupported(f"index {index}: a vector that is not a ramp")
            return index, 0, 1
        if not isinstance(index.stride, tirx.IntImm):
            raise Unsupported(f"index {index}: the stride is not constant")
        base, stride, lanes = index.base, int(index.stride), int(index.lanes)
        if stride == 1 and ty.bits <= 32 and ty.code != "bool":
            align = self.known_multiple(base, 0)
            for bits in UNITS:
                step = bits // ty.bits
                if step > 1 and lanes % step == 0 and align % step == 0:
                    return base, 1, step
        return base, stride, 1

    def known_multiple(self, index, k):
        """A number that divides index + k."""
        known: Any = self.analyzer.modular_set(index)
        return math.gcd(1 << 20, math.gcd(int(known.coeff), int(known.base) + k))

    # ---- addresses of parameters

    def root(self, buffer):
        """The parameter (a variable) that a buffer is a view of."""
        if (found := self.roots.get(buffer, buffer)) not in self.parameters:
            raise Unsupported(f"buffer {buffer.name}, which is not a parameter and was not allocated")
        return found

    def read_only(self, buffer):
        return self.root(buffer) not in self.written

    def operands(self, buffer, index, k, ty, store=False):
        """The memory operands of an access to element index + k of a parameter."""
        aligned = math.gcd(ALIGNMENT, self.known_multiple(index, k) * (ty.bits // 8))
        if self.vulkan_model and self.root(buffer) in self.coherent:
            shared = opcodes.NON_PRIVATE | (opcodes.MAKE_POINTER_AVAILABLE if store else opcodes.MAKE_POINTER_VISIBLE)
            return opcodes.ALIGNED | shared, aligned, self.device_scope()
        return opcodes.ALIGNED, aligned

    def device_scope(self):
        """The scope of all invocations that share memory. In the Vulkan memory model it is the queue family: its Device
        scope would need another feature."""
        return self.int_const(opcodes.QUEUE_FAMILY if self.vulkan_model else opcodes.DEVICE)

    def pointer(self, buffer, unit, index, k, step, array=False, volatile=False):
        """A pointer to the unit of `step` elements that begins at element index + k of a parameter. array: the pointer
        is also used for the following units. volatile: the host or another device may access this memory meanwhile."""
        asm, root = self.asm, self.root(buffer)
        address = self._address(buffer, root, index, k, size(unit) // step)
        target = asm.type(unit) if isinstance(unit, tuple) else asm.storage_type(unit)
        member = asm.array_in_memory(target, size(unit)) if array else target
        marks = []
        if volatile:
            marks = ["Coherent", "Volatile"]
        elif root not in self.written:
            marks.append("NonWritable")
        if root in self.coherent and not self.vulkan_model and not volatile:
            marks.append("Coherent")
        pointer = asm.pointer("PhysicalStorageBuffer", target)
        if not marks and not array:
            return asm.op("ConvertUToPtr", pointer, address)
        block = asm.op("ConvertUToPtr", asm.pointer("PhysicalStorageBuffer", asm.block([member], [0], *marks)), address)
        zero = self.int_const(0)
        return asm.op("AccessChain", pointer, block, zero, *([zero] if array else []))

    def _address(self, buffer, root, index, k, element):
        """The 64-bit address of element index + k. element: bytes of an element."""
        asm = self.asm
        address = self.parameters[root]
        shared, own, constant = self._split(index)
        far = bytes_of(buffer) > 1 << 32  # then byte offsets need 64 bits; element numbers still fit 32
        shift = element.bit_length() - 1
        for terms in filter(None, (shared, own)):
            total = None
            for expression, factor in terms:
                term = self.value(expression)
                term = asm.op("UConvert", "i32", term) if parse(expression.ty).bits == 64 else term
                term = term if factor == 1 else asm.op("IMul", "i32", term, self.int_const(factor))
                total = term if total is None else asm.op("IAdd", "i32", total, term)
            if shift and not far:
                total = asm.op("ShiftLeftLogical", "i32", total, self.int_const(shift))
            total = asm.op("UConvert", "i64", total)
            if shift and far:
                total = asm.op("ShiftLeftLogical", "i64", total, self.int_const(shift))
            address = asm.op("IAdd", "i64", address, total)
        if constant + k:
            address = asm.op("IAdd", "i64", address, asm.const("i64", (constant + k) * element))
        return address

    def _split(self, index):
        """Splits an index into (terms that are uniform in a subgroup, other terms, constant). A term is (expression,
        factor)."""
        leaves, constant = [], 0

        def flatten(e, factor):
            nonlocal constant
            definition = self.definitions.get(e) if kind(e) == "Var" else None
            if kind(e) == "IntImm":
                constant += int(e) * factor
            elif kind(e) == "Add":
                flatten(e.a, factor)
                flatten(e.b, factor)
            elif kind(e) == "Mul" and isinstance(e.b, tirx.IntImm):
                flatten(e.a, factor * int(e.b))
            elif definition is not None and kind(definition) in ("Add", "Mul"):
                flatten(definition, factor)
            else:
                leaves.append((e, factor))

        flatten(index, 1)
        if any(factor < 0 or self._least(e) < 0 for e, factor in leaves):
            return [], [(index, 1)], 0  # a term may be negative: only the whole sum can be zero-extended
        terms = [(leaf, self.varies(leaf[0])) for leaf in leaves]
        return [leaf for leaf, varies in terms if not varies], [leaf for leaf, varies in terms if varies], constant

    def _least(self, e) -> int:
        """A lower bound of an expression, from the analyzer."""
        bound: Any = self.analyzer.const_int_bound(e)
        return int(bound.min_value)

    def timeless(self, e):
        """Whether an expression has the same value at every place where its variables are known."""
        return not contains(e, lambda n: kind(n) == "TensorLoad" or (kind(n) == "Call" and _plain_name(n) not in PLAIN))

    def varies(self, e):
        """Whether an expression may differ between the lanes of a subgroup."""
        return contains(e, self._is_varying)

    def _is_varying(self, node):
        if kind(node) == "TensorLoad":
            return node.source in self.arrays or not self.read_only(node.source)
        if kind(node) == "Call":
            return _plain_name(node) not in PLAIN
        return isinstance(node, tvm.ir.Var) and node in self.varying


def _plain_name(call):
    return call.op.name.removeprefix("tirx.")
