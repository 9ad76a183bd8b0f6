"""Building blocks of CPU kernels: operations on explicit vectors, for TVMScript's builder.

All functions are called while an IRBuilder prim_func is open. `T.Bind` binds a value to a variable, so that it is
computed once; "in a register" means such a value. `n` is a number of lanes, by default 16; LLVM splits vectors that are
larger than registers. n = 1 is a scalar.
"""

import math
import operator

from tvm.tirx.script import builder as T

from mlc_amd.schedules.operators.attention import LOG2E

LANES = 16
LINE = 64  # bytes of a cache line
# Coefficients of a polynomial for 2**f on [0, 1), the highest power first: a minimax fit with a relative error of 2e-7,
# exactly 1 at 0
EXP2 = (1.86713011e-3, 9.01703022e-3, 5.57999132e-2, 2.4016445e-1, 6.93151312e-1, 1.0)

# ln 2 as the sum of two numbers. Products of the first one with whole numbers (of up to 8 bits) are exact.
LN2 = (0.693145751953125, 1.42860682030941723e-6)


def largest_divisor(limit, count):
    """The largest divisor of `count` that does not exceed `limit`; 1 if limit < 1."""
    return next(n for n in range(max(1, min(limit, count)), 0, -1) if count % n == 0)


def dtype(name, n):
    """The type of a vector: dtype("float32", 16) is "float32x16", dtype("float32", 1) is "float32"."""
    return name if n == 1 else f"{name}x{n}"


def at(base, n=LANES):
    """The index vector base, base+1, ..., base+n-1. It can only be the last index of a buffer."""
    return base if n == 1 else T.ramp(base, 1, n)


def splat(x, n=LANES):
    """`x` in all `n` lanes."""
    return x if n == 1 else T.broadcast(x, n)


def f32(x, n=LANES):
    """The Python number `x` as float32 in all `n` lanes."""
    return splat(T.float32(x), n)


def i32(x, n=LANES):
    """The Python number `x` as int32 in all `n` lanes."""
    return splat(T.int32(x), n)


def intrin(result, name, *args):
    """The value of an LLVM intrinsic without side effects, in a register. result: its type."""
    return T.Bind(T.call_llvm_pure_intrin(result, name, *args))


def pin(x, n):
    """`n` lanes of uint8 in a register, for values that are used more than once.

    T.Bind is not enough: TVM's simplifier replaces each use of a bound integer by its expression, so that code and
    compile time explode. It does not move calls that may have side effects. So x goes through such a call, a maximum
    with 0, which LLVM removes."""
    return T.Bind(T.call_llvm_intrin(dtype("uint8", n), "llvm.umax", x, splat(T.uint8(0), n)))


def widen(x, n=LANES):
    """`n` lanes of any number type as float32, in a register."""
    return T.Bind(T.cast(x, dtype("float32", n)))


def half_bits(x, n=LANES):
    """`n` lanes of finite float16 as float32, without conversion instructions, for machines where LLVM would call a
    function for each lane. It moves exponent and mantissa to their places in a float32, and multiplies by 2**112, as
    the exponent bias of float32 is larger by 112. This is also correct for denormals."""
    bits = T.Bind(T.cast(T.reinterpret(dtype("uint16", n), x), dtype("uint32", n)))

    def word(value):
        return splat(T.uint32(value), n)

    magnitude = T.reinterpret(dtype("float32", n), T.shift_left(bits & word(0x7FFF), word(13))) * f32(2.0**112, n)
    sign = T.shift_left(bits & word(0x8000), word(16))
    return T.Bind(T.reinterpret(dtype("float32", n), T.reinterpret(dtype("uint32", n), magnitude) | sign))


def bf16(x, n=LANES):
    """`n` lanes of bfloat16 as float32, in a register. x: their bits, uint16."""
    return T.Bind(
        T.reinterpret(dtype("float32", n), T.shift_left(T.cast(x, dtype("uint32", n)), splat(T.uint32(16), n)))
    )


def store(buf, x, *index):
    """buf[index] = x; the last index may be a vector (`at`)."""
    T.buffer_store(buf, x, list(index))


def local(*shape, dtype="float32"):
    """A scratch buffer of this thread.

    Below 1 KB it is on the stack; if all its indices are constants, LLVM keeps it in registers. So use one small buffer
    for each accumulator. TVM takes larger buffers from a pool, by a call. With scope "local" it would do so for all
    sizes, and LLVM would store registers to memory."""
    return T.alloc_buffer(shape, dtype)


def registers(*shape, kind="float32"):
    """A small buffer of 4-byte elements on this thread's stack. If all its indices are constants, LLVM keeps it in
    registers.

    T.alloc_buffer with scope "local" would take the memory from TVM's workspace pool, even for 4 bytes. LLVM must
    assume that a prefetch accesses that memory, so a loop with a prefetch would store its sums in each step.
    """
    words = T.tvm_stack_alloca("shape", (math.prod(shape) + 1) // 2)  # "shape": elements of 8 bytes
    data = T.Bind(T.reinterpret(T.handle(kind, "local").ty, words))
    return T.decl_buffer(shape, kind, data=data, scope="local")


def opaque(x, kind="int32"):
    """The value of x, whose expression TVM cannot see: TVM's simplifier is slow for nested index arithmetic, and for
    conditions on it. To TVM the result is a load from memory; LLVM makes it a register."""
    cell = registers(1, kind=kind)
    store(cell, x, 0)
    return cell[0]


def prefetch(buf, *index, ahead=0, locality=3):
    """Prefetches the cache line with the element that is `ahead` elements after buf[index]; it may be out of bounds.
    locality: LLVM's hint: 3: into all cache levels; 2: into L2 and beyond; 0: non-temporal, only into L1."""
    where = (*index[:-1], index[-1] + ahead)
    T.evaluate(
        T.call_llvm_intrin("void", "llvm.prefetch", T.address_of(buf[where]), T.int32(0), T.int32(locality), T.int32(1))
    )


def reduce(op, x):
    """LLVM's reduction `op` over the lanes of a vector: a scalar in a register. op: for float32 fmax, fmin or fadd (in
    the order of lanes, as LLVM may not reassociate); for int32 add, smax, smin or `or`."""
    start = [T.float32(-0.0)] if op == "fadd" else []
    return intrin("float32" if op[0] == "f" else "int32", f"llvm.vector.reduce.{op}", *start, x)


def tree(join, x, n=LANES):
    """The reduction of a float32 vector's lanes by `join`, as a tree of log2(n) operations on halves. Use it for
    maximums too, because llvm.vector.reduce.fmax takes more instructions to handle NaNs."""
    while n > 1:
        n //= 2
        low, high = (T.Shuffle([x], [T.int32(i + h * n) for i in range(n)]) for h in (0, 1))
        x = T.Bind(join(low, high))
    return x


def tree_add(x, n=LANES):
    """The sum of the lanes of a float32 vector."""
    return tree(operator.add, x, n)


def join_lanes(join, vectors, n=LANES):
    """Reduces the lanes of several vectors (a power of two of them) by `join`, neighbouring lanes first. Returns a
    vector with one lane for each of them."""

    def halves(x, count):  # even and odd lanes
        return (T.Shuffle(x, [T.int32(2 * i + odd) for i in range(count)]) for odd in range(2))

    count = len(vectors)
    while len(vectors) > 1:
        vectors = [T.Bind(join(*halves(list(pair), n))) for pair in zip(vectors[::2], vectors[1::2], strict=True)]
    while n > count:
        n //= 2
        vectors = [T.Bind(join(*halves(vectors, n)))]
    return vectors[0]


def exp2(x, n=LANES):
    """2**x with a relative error of 2e-7, exact for integers. x is clamped to -126 .. 127, so there are no infinities
    and no denormals. floor(x) is added to the exponent's bits. A multiplication would not do: LLVM could fuse it with
    the next operation in one kernel but not in another, and their bits would differ."""
    x = T.Bind(T.min(T.max(x, f32(-126.0, n)), f32(127.0, n)))
    whole = T.Bind(T.floor(x))
    bits = T.reinterpret(dtype("int32", n), T.Bind(_exp2_of_fraction(T.Bind(x - whole), n)))
    return T.Bind(T.reinterpret(dtype("float32", n), bits + T.shift_left(T.cast(whole, dtype("int32", n)), i32(23, n))))


def exp2_avx512(x, n=LANES):
    """`exp2` of 16 lanes by AVX-512's instructions for fractions (vreduceps) and for powers of two (vscalefps); no
    clamping is needed."""
    kind, x, every = dtype("float32", n), T.Bind(x), T.int16(-1)
    down, current = T.int32(0x9), T.int32(4)  # x - floor(x), no exceptions; the current rounding
    fraction = intrin(kind, "llvm.x86.avx512.mask.reduce.ps.512", x, down, x, every, current)
    return intrin(kind, "llvm.x86.avx512.mask.scalef.ps.512", _exp2_of_fraction(fraction, n), x, x, every, current)


def _exp2_of_fraction(f, n):
    y = f32(EXP2[0], n)
    for c in EXP2[1:]:
        y = y * f + f32(c, n)
    return y


def exp(x, isa, n=LANES):
    """e**x for x from -87 to 88, with a relative error of 5e-7 even for large x, for which 2**(x * log2(e)) would be
    less precise because the product is rounded."""
    whole = T.Bind(T.floor(x * f32(LOG2E, n)))
    rest = T.Bind((x - whole * f32(LN2[0], n)) - whole * f32(LN2[1], n))
    return T.Bind(isa.exp2(rest * f32(LOG2E, n), n) * isa.exp2(whole, n))
