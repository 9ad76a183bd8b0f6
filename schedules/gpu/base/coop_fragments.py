"""Cooperative matrices (KHR_cooperative_matrix of Vulkan) as kernels use them: fragments, whose elements
are distributed over the lanes of a wave.

Which lane holds which element is implementation-defined. Operations on elements treat all of them alike, or combine
elements of several fragments of one kind, which have the same layout.
"""

from tvm import tirx
from tvm.tirx.script import builder as T

from mlc_amd.schedules.tir import Expr, Frame

Shape = tuple[int, int, int]  # rows and columns of the product, and what the sums are over: m, n, k

# kind: (TVM's scope, element type). "a" and "b" are operands, "sum" and "half" results
KINDS = {
    "a": ("wmma.matrix_a", "float16"),
    "b": ("wmma.matrix_b", "float16"),
    "sum": ("wmma.accumulator", "float32"),
    "half": ("wmma.accumulator", "float16"),
}


class Fragments:
    """`count` fragments of one kind (of KINDS), for matrices of that shape."""

    def __init__(self, kind: str, count: int, shape: Shape):
        scope, self.dtype = KINDS[kind]
        self.shape, self.count = shape, count
        m, n, k = shape
        size = {"a": m * k, "b": k * n}.get(kind, m * n)
        self.buffer = T.alloc_buffer((count * size,), self.dtype, scope=scope)

    def fill(self, i: Expr, value: float) -> None:
        """All elements of fragment i; the first thing that happens to it, or `load`."""
        T.evaluate(T.tvm_fill_fragment(self.buffer.data, *self.shape, i, tirx.const(value, self.dtype)))

    def clear(self) -> None:
        """All of them become 0."""
        for i in range(self.count):
            self.fill(i, 0)

    def load(self, i: Expr, place: Expr, stride: int, layout: str) -> None:
        """From buffer[index] on; the stride is in elements of the buffer's type. Sums of 16 x 8 are loaded by columns:
        by rows, NVIDIA's driver 580 reads other memory in large kernels (`attention_rows_shared.py`)."""
        T.evaluate(T.tvm_load_matrix_sync(self.buffer.data, *self.shape, i, T.address_of(place), stride, layout))

    def store(self, i: Expr, place: Expr, stride: int, layout: str) -> None:
        """As `load`, to there."""
        T.evaluate(T.tvm_store_matrix_sync(self.buffer.data, *self.shape, i, T.address_of(place), stride, layout))

    def add_product(self, i: Expr, a: "Fragments", ai: Expr, b: "Fragments", bi: Expr) -> None:
        """self[i] += a[ai] @ b[bi]."""
        T.evaluate(T.tvm_mma_sync(self.buffer.data, i, a.buffer.data, ai, b.buffer.data, bi, self.buffer.data, i))

    def convert(self, i: Expr, other: "Fragments", oi: Expr) -> None:
        """self[i] = other[oi] in this type; self[i] was filled before."""
        T.evaluate(T.call_extern("void", "fragment_cast", self.buffer.data, i, other.buffer.data, oi))

    def elements(self, i: Expr) -> Frame:
        """`with f.elements(i) as e:` for each element that the lane holds; all fragments of one kind have the same."""
        return T.serial(T.call_extern("int32", "fragment_length", self.buffer.data, i))

    def get(self, i: Expr, e: Expr) -> Expr:
        """Element e of fragment i."""
        return T.Bind(T.call_extern(self.dtype, "fragment_get", self.buffer.data, i, e))

    def set(self, i: Expr, e: Expr, value: Expr) -> None:
        T.evaluate(T.call_extern("void", "fragment_set", self.buffer.data, i, e, value))
