"""Values in registers: local buffers, vectors and their elements."""

from tvm.tirx.script import builder as T


def local(size, dtype="float32"):
    """A buffer in registers; after unrolling all its indices must be constants."""
    return T.alloc_buffer((size,), dtype, scope="local")


def put(buffer, value, *index):
    """buffer[index] = value."""
    T.buffer_store(buffer, value, list(index))


def at(base, n):
    """The index vector base, ..., base+n-1 (a buffer's last index only)."""
    return T.ramp(base, 1, n) if n > 1 else base


def opaque(x):
    """The scalar `x` in a register that is opaque to TVM, which otherwise substitutes bound values into the expressions
    that use them: chains of them take minutes to compile."""
    cell = local(1, str(x.ty))
    put(cell, x, 0)
    return cell[0]


def lane_of(x, i):
    """Element i of a vector."""
    return T.Shuffle([x], [T.int32(i)])


def vector(values):
    """Scalars as one vector."""
    return T.Shuffle(values, [T.int32(i) for i in range(len(values))])
