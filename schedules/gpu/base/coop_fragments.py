"""Cooperative matrices (KHR_cooperative_matrix of Vulkan) as kernels use them: fragments, whose elements
are distributed over the lanes of a wave.

Which lane holds which element is implementation-defined. Operations on elements treat all of them alike, or combine
elements of several fragments of one kind, which have the same layout.
"""

from tvm import tirx
from tvm.tirx.script import builder as T

# kind: (TVM's scope, element type). "a" and "b" are operands, "sum" and "half" results
KINDS = {
    "a": ("wmma.matrix_a", "float16"),
    "b": ("wmma.matrix_b", "float16"),
    "sum": ("wmma.accumulator", "float32"),
    "half": ("wmma.accumulator", "float16"),
}


class Fragments:
    """`count` fragments of one kind (of KINDS), for matrices of shape (m, n, k)."""

    def __init__(self, kind, count, shape):
        scope, self.dtype = KINDS[kind]
        self.shape, self.count = shape, count
        m, n, k = shape
        size = {"a": m * k, "b": k * n}.get(kind, m * n)
        self.buffer = T.alloc_buffer((count * size,), self.dtype, scope=scope)

    def fill(self, i, value):
        """All elements of fragment i; the first thing that happens to it, or `load`."""
        T.evaluate(T.tvm_fill_fragment(self.buffer.data, *self.shape, i, tirx.const(value, self.dtype)))

    def load(self, i, place, stride, layout):
        """From buffer[index] on; the stride is in elements of the buffer's type. Sums of 16 x 8 are loaded by columns:
        by rows, NVIDIA's driver 580 reads other memory in large kernels (`attention_rows_matrix.py`)."""
        T.evaluate(T.tvm_load_matrix_sync(self.buffer.data, *self.shape, i, T.address_of(place), stride, layout))

    def store(self, i, place, stride, layout):
        """As `load`, to there."""
        T.evaluate(T.tvm_store_matrix_sync(self.buffer.data, *self.shape, i, T.address_of(place), stride, layout))

    def add_product(self, i, a, ai, b, bi):
        """self[i] += a[ai] @ b[bi]."""
        T.evaluate(T.tvm_mma_sync(self.buffer.data, i, a.buffer.data, ai, b.buffer.data, bi, self.buffer.data, i))

    def convert(self, i, other, oi):
        """self[i] = other[oi] in this type; self[i] was filled before."""
        T.evaluate(T.call_extern("void", "fragment_cast", self.buffer.data, i, other.buffer.data, oi))

    def elements(self, i):
        """`with f.elements(i) as e:` for each element that the lane holds; all fragments of one kind have the same."""
        return T.serial(T.call_extern("int32", "fragment_length", self.buffer.data, i))

    def get(self, i, e):
        """Element e of fragment i."""
        return T.Bind(T.call_extern(self.dtype, "fragment_get", self.buffer.data, i, e))

    def set(self, i, e, value):
        T.evaluate(T.call_extern("void", "fragment_set", self.buffer.data, i, e, value))
