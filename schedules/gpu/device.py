"""Device intrinsics of the GPU kernels: what TVMScript's builder has no name for, per arch.

Everything here is called while an IRBuilder prim_func is open and emits code there. Functions that return a value return it bound to a
register (`T.Bind`). Words are 32 bits: int32, uint32 or float32 scalars of a lane. Lanes of a wave are consecutive threadIdx.x, then y, z.
"""
from contextlib import ExitStack, contextmanager

from tvm.tirx.script import builder as T

AXES = "xyz"

# Data parallel primitives (DPP): lane permutations that are part of a vector instruction, as dpp_ctrl values of LLVM's AMDGPU backend.
DPP = {1: 0xB1, 2: 0x4E, 3: 0x1B, 7: 0x141, 8: 0x128, 15: 0x140}     # lane ^ mask: quad_perm, row_half_mirror, row_ror:8, row_mirror
MIRROR = {4: 7}     # in a reduction groups of four hold one value by then: the mirror image of eight lanes is as good, and it is DPP


@contextmanager
def launch(grid, block):
    """`with launch((gx, gy), (tx, ty)) as (bx, by, tx, ty):` binds the grid's and the workgroup's axes (1 to 3 each, x first).

    Extents are Python ints. One `launch` makes one kernel.
    """
    with ExitStack() as stack:
        axes = [(f"{kind}.{axis}", extent) for kind, extents in (("blockIdx", grid), ("threadIdx", block))
                for axis, extent in zip(AXES, extents, strict=False)]
        yield tuple(stack.enter_context(T.launch_thread(axis, extent)) for axis, extent in axes)


def barrier():
    """Waits until all threads of the workgroup are here and see each other's LDS writes (code generation adds the wait for those).
    Not inside an `if`: TVM refuses that; a uniform condition can be a loop of 0 or 1 steps."""
    T.evaluate(T.tvm_storage_sync("shared"))


def intrin(dtype, name, *args):
    """The value of an LLVM intrinsic, in a register. TVM believes that it has effects (LLVM knows better): it would put the expression
    back wherever a bound pure call is used, which makes chains of them explode, and move lane exchanges into branches where partner
    lanes are not active."""
    return T.Bind(T.call_llvm_intrin(dtype, name, *args))


def word(x):
    """The bits of a float32 or uint32 as int32."""
    return x if str(x.ty) == "int32" else T.reinterpret("int32", x)


# ---- arithmetic


def dot4(arch, a, b, c):
    """c + the sum of the four products of the signed bytes of the words a and b; c and the result int32."""
    a, b = word(a), word(b)
    if arch.dot == "sudot4":
        return intrin("int32", "llvm.amdgcn.sudot4", T.bool(True), a, T.bool(True), b, c, T.bool(False))
    if arch.dot == "sdot4":
        return intrin("int32", "llvm.amdgcn.sdot4", a, b, c, T.bool(False))
    a, b = T.Bind(a), T.Bind(b)
    for i in range(4):
        c = c + _byte(a, i) * _byte(b, i)
    return T.Bind(c)


def _byte(x, i):
    """Byte i of an int32 with its sign."""
    return T.shift_right(T.shift_left(x, T.int32(24 - 8 * i)), T.int32(24))


def dot2(arch, a, b, c):
    """c + a[0]*b[0] + a[1]*b[1] of two words of two float16 each; c and the result float32."""
    a, b = (T.Bind(T.reinterpret("float16x2", x)) for x in (a, b))
    if arch.dot2:
        return intrin("float32", "llvm.amdgcn.fdot2", a, b, c, T.bool(False))
    for i in range(2):
        c = c + T.cast(T.Shuffle([a], [i]), "float32") * T.cast(T.Shuffle([b], [i]), "float32")
    return T.Bind(c)


def fma(a, b, c):
    """a*b + c, rounded once; float32 or float16, scalars or vectors."""
    return intrin(str(c.ty), "llvm.fma", a, b, c)


def exp2(x):
    """2**x, one instruction, relative error 2e-7; results below 2**-126 may be 0. float32."""
    return intrin("float32", "llvm.amdgcn.exp2.f32", x)


def maximum(x, y):
    """The larger of two float32, the other one if one is not a number: one instruction, where T.max becomes a comparison and a select."""
    return intrin("float32", "llvm.maxnum", x, y)


def minimum(x, y):
    """The smaller of two float32, see `maximum`."""
    return intrin("float32", "llvm.minnum", x, y)


def rsqrt(x):
    """1 / sqrt(x), one instruction, relative error 1.2e-7. float32."""
    return intrin("float32", "llvm.amdgcn.rsq.f32", x)


def rcp(x):
    """1 / x, one instruction, relative error 1.2e-7. float32."""
    return intrin("float32", "llvm.amdgcn.rcp.f32", x)


def rint(x):
    """x rounded to a whole number, ties to even. float32."""
    return intrin("float32", "llvm.rint", x)


# ---- lanes of a wave


def _across(x, call):
    """What the intrinsic call(bits) -> (name, *arguments) makes of the bits of the word x, in a register of x's type."""
    dtype = str(x.ty)
    bits = intrin("int32", *call(word(x)))
    return bits if dtype == "int32" else T.Bind(T.reinterpret(dtype, bits))


def lane_id(arch):
    """This lane's number in its wave, int32."""
    low = intrin("int32", "llvm.amdgcn.mbcnt.lo", T.int32(-1), T.int32(0))
    return low if arch.wave == 32 else intrin("int32", "llvm.amdgcn.mbcnt.hi", T.int32(-1), low)


def uniform(x):
    """The first active lane's value of a word in all lanes, in a scalar register: for values that are the same in all lanes anyway."""
    return _across(x, lambda bits: ("llvm.amdgcn.readfirstlane", bits))


def shuffle(x, lane):
    """The word x of lane number `lane` of the wave (int32, may differ per lane). Through the LDS unit."""
    return _across(x, lambda bits: ("llvm.amdgcn.ds.bpermute", lane * T.int32(4), bits))


def shuffle_xor(arch, x, mask):
    """The word x of the lane whose number differs by `mask` (an int, 1..wave-1). Without the LDS unit: masks in DPP, on RDNA also 16."""
    if not 0 < mask < arch.wave:
        raise ValueError(f"no lane of a wave of {arch.wave} has a partner at distance {mask}")
    if mask in DPP:
        control, all_rows, all_banks = T.int32(DPP[mask]), T.int32(0xF), T.int32(0xF)
        return _across(x, lambda bits: ("llvm.amdgcn.update.dpp", T.int32(0), bits, control, all_rows, all_banks, T.bool(True)))
    if mask == 16 and arch.wave == 32:
        low, high = T.int32(0x76543210), T.int32(0xFEDCBA98 - (1 << 32))        # lane i of a row reads lane i of the other row
        return _across(x, lambda bits: ("llvm.amdgcn.permlanex16", T.int32(0), bits, low, high, T.bool(False), T.bool(True)))
    return shuffle(x, lane_id(arch) ^ T.int32(mask))


def wave_reduce(arch, x, op, width=None):
    """op over `width` (a power of two, default: the wave) neighbouring lanes, the same in all of them. `op(x, y)` is commutative and
    associative, on float32, int32 or uint32 words. All lanes must be active."""
    width = width or arch.wave
    distance = 1
    while distance < width:
        x = T.Bind(op(x, shuffle_xor(arch, x, MIRROR.get(distance, distance))))
        distance *= 2
    return x


def wave_sum(arch, x, width=None):
    """The sum over `width` neighbouring lanes (default: the wave), the same bits in all of them."""
    return wave_reduce(arch, x, lambda a, b: a + b, width)


def wave_max(arch, x, width=None):
    """The largest float32 of `width` neighbouring lanes (default: the wave), in all of them."""
    return wave_reduce(arch, x, maximum, width)
