"""Emits cooperative matrices (SPV_KHR_cooperative_matrix) for TVM's tensor core form.

In: buffers in the scopes wmma.matrix_a, wmma.matrix_b and wmma.accumulator; calls of tvm_fill_fragment,
tvm_load_matrix_sync, tvm_mma_sync and tvm_store_matrix_sync; and these externs, in which a fragment is two arguments
(buffer.data, constant index):
    fragment_scale(fragment, scalar)        in place
    fragment_cast(to, from)                 between accumulators of equal shape
    fragment_length(fragment)               number of components that a lane holds; only the driver knows which ones
    fragment_get(fragment, i)               a lane's component i
    fragment_set(fragment, i, value)
Out: each fragment becomes a variable of the function.
"""

from tvm import tirx

from mlc_amd.compiler.codegen.spirv.memory import Memory
from mlc_amd.compiler.codegen.spirv.opcodes import SUBGROUP
from mlc_amd.compiler.codegen.spirv.types import FRAGMENTS, Unsupported, parse, scope, storage

LAYOUTS = {"row_major": 0, "col_major": 1}
CONVERSIONS = {("float", "float"): "FConvert", ("int", "float"): "ConvertSToF", ("uint", "float"): "ConvertUToF"}


class Matrix(Memory):
    """Part of the emitter: cooperative matrices."""

    def _fragment(self, data, index, shape=None):
        """(variable, matrix type) of a fragment of a buffer. shape: (m, n, k), needed if it may not exist yet."""
        buffer = data.args[0]
        if not isinstance(index, tirx.IntImm):
            raise Unsupported(f"fragment {index} of {buffer.name}: the index must be constant, unroll the loop")
        known, i = self.fragments[buffer], int(index)
        if i not in known:
            if shape is None:
                raise Unsupported(f"fragment {i} of {buffer.name}, which was neither filled nor loaded")
            of = self._matrix_type(buffer, *(int(x) for x in shape))
            known[i] = self.asm.variable("Function", of), of
        return known[i]

    def _matrix_type(self, buffer, m, n, k):
        rows, columns = {"wmma.matrix_a": (m, k), "wmma.matrix_b": (k, n), "wmma.accumulator": (m, n)}[scope(buffer)]
        sizes = (self.int_const(x) for x in (SUBGROUP, rows, columns, FRAGMENTS[scope(buffer)]))
        return self.asm.unique("TypeCooperativeMatrixKHR", self._component_type(parse(buffer.dtype)), *sizes)

    def _component_type(self, ty):
        """The type of a component. It has a sign: drivers take the sign of integers from this type, not only from
        instructions."""
        if ty.code == "float":
            return self.asm.type(storage(ty))
        if ty.bits == 8:
            self.asm.capabilities.add("Int8")
        return self.asm.unique("TypeInt", ty.bits, int(ty.code == "int"))

    def _load_fragment(self, fragment):
        variable, of = fragment
        return self.asm.op("Load", of, variable, pure=False)

    def call_tvm_fill_fragment(self, e, data, m, n, k, index, value):
        asm, (variable, of) = self.asm, self._fragment(data, index, (m, n, k))
        constant = isinstance(value, tirx.IntImm | tirx.FloatImm)
        if isinstance(value, tirx.IntImm) and parse(value.ty).code == "int":
            scalar = asm.unique("Constant", asm.unique("TypeInt", 32, 1), int(value) & 0xFFFFFFFF)
        else:
            scalar = self.value(value)
        filled = asm.unique("ConstantComposite", of, scalar) if constant else asm.op("CompositeConstruct", of, scalar)
        asm.emit("Store", variable, filled)

    def _matrix_memory(self, address, stride, layout, store=False):
        """(pointer, layout, stride in elements of the pointer's type, *memory operands)."""
        load = address.args[0]
        buffer, index, ty = load.source, load.indices[0], parse(load.source.dtype)
        if buffer in self.arrays:
            array = self.arrays[buffer]
            pointer, operands = self.element(array, self.value(index)), self.order(array)
        else:
            pointer = self.pointer(buffer, storage(ty), index, 0, 1, array=True)
            operands = self.operands(buffer, index, 0, ty, store)
        if ty.lanes > 1 and self.known_multiple(stride, 0) % ty.lanes:
            raise Unsupported(f"stride {stride} in a buffer of {buffer.dtype}")
        in_units = self.value(self.analyzer.simplify(tirx.floordiv(stride, ty.lanes)))
        return pointer, self.int_const(LAYOUTS[str(layout.value)]), in_units, *operands

    def call_tvm_load_matrix_sync(self, e, data, m, n, k, index, address, stride, layout):
        asm, (variable, of) = self.asm, self._fragment(data, index, (m, n, k))
        operands = self._matrix_memory(address, stride, layout)
        asm.emit("Store", variable, asm.op("CooperativeMatrixLoadKHR", of, *operands, pure=False))

    def call_tvm_store_matrix_sync(self, e, data, m, n, k, index, address, stride, layout):
        fragment = self._fragment(data, index)
        pointer, *operands = self._matrix_memory(address, stride, layout, store=True)
        self.asm.emit("CooperativeMatrixStoreKHR", pointer, self._load_fragment(fragment), *operands)

    def call_tvm_mma_sync(self, e, result, result_index, a, a_index, b, b_index, c, c_index):
        """result = a * b + c"""
        asm, sums = self.asm, self._fragment(c, c_index)
        values = [self._load_fragment(x) for x in (self._fragment(a, a_index), self._fragment(b, b_index), sums)]
        signed = sum(1 << i for i, x in enumerate((a, b, c, result)) if parse(x.args[0].dtype).code == "int")
        value = asm.op("CooperativeMatrixMulAddKHR", sums[1], *values, *([signed] if signed else []), pure=False)
        known = self.fragments[result.args[0]]
        if isinstance(result_index, tirx.IntImm) and int(result_index) not in known:
            known[int(result_index)] = asm.variable("Function", sums[1]), sums[1]
        asm.emit("Store", self._fragment(result, result_index)[0], value)

    def fragment_scale(self, e, data, index, scalar):
        variable, of = fragment = self._fragment(data, index)
        factors = self._load_fragment(fragment), self.value(scalar)
        self.asm.emit("Store", variable, self.asm.op("MatrixTimesScalar", of, *factors, pure=False))

    def fragment_length(self, e, data, index):
        return self.asm.op("CooperativeMatrixLengthKHR", "i32", self._fragment(data, index)[1])

    def _place_in_fragment(self, data, index, place):
        """A pointer to a component of a fragment."""
        ty = parse(data.args[0].dtype)
        pointer = self.asm.pointer("Function", self._component_type(ty))
        return self.asm.op("AccessChain", pointer, self._fragment(data, index)[0], self.value(place))

    def fragment_get(self, e, data, index, place):
        ty = parse(data.args[0].dtype)
        loaded = self.asm.op("Load", self._component_type(ty), self._place_in_fragment(data, index, place), pure=False)
        if ty.code == "float":
            return self.from_storage(loaded, ty)
        op = "Bitcast" if ty.bits == 32 else "SConvert" if ty.code == "int" else "UConvert"
        return self.asm.op(op, "i32", loaded)

    def fragment_set(self, e, data, index, place, value):
        ty = parse(data.args[0].dtype)
        if ty.code != "float":
            raise Unsupported(f"setting components of {data.args[0].dtype} fragments")
        self.asm.emit(
            "Store", self._place_in_fragment(data, index, place), self.to_storage(self.value(value), ty, storage(ty))
        )

    def fragment_cast(self, e, to, to_index, source, source_index):
        """Converts element by element. Both fragments must have been filled."""
        target, fragment = self._fragment(to, to_index), self._fragment(source, source_index)
        codes = parse(source.args[0].dtype).code, parse(to.args[0].dtype).code
        if codes not in CONVERSIONS:
            raise Unsupported(f"fragments of {codes[0]} as {codes[1]}")
        converted = self.asm.op(CONVERSIONS[codes], target[1], self._load_fragment(fragment), pure=False)
        self.asm.emit("Store", target[0], converted)
