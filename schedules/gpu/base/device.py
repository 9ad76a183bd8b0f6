"""Device intrinsics for GPU kernels: operations for which TVMScript's builder has no name.

All functions emit code into the prim_func that is open in TVM's IRBuilder. Those that return a value return it bound to
a register (`T.Bind`). A word is a scalar of 32 bits of a lane: int32, uint32 or float32. The lanes of a wave are
consecutive in threadIdx.x, then y, then z.

`arch.api` selects the code: "rocm" emits AMD's LLVM intrinsics, "vulkan" calls named "vk.*", which the SPIR-V generator
translates. Both use LLVM's names for arithmetic, which the SPIR-V generator also translates.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from tvm import tirx
from tvm.tirx.script import builder as T

from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.registers import opaque
from mlc_amd.schedules.tir import Expr

AXES = "xyz"
# Attribute of a kernel: the names of the parameters through which workgroups of a launch exchange data.
COHERENT = "mlc_amd.coherent"
# Scope of shared memory through which only lanes of the same wave exchange data: TVM adds no workgroup barriers for it.
WAVE_SHARED = "shared.wave"

# Data parallel primitives (DPP): lane permutations that are part of a vector instruction. {mask: dpp_ctrl of LLVM's
# AMDGPU backend for lane ^ mask}: quad_perm, row_half_mirror, row_ror:8, row_mirror.
DPP = {0: 0xE4, 1: 0xB1, 2: 0x4E, 3: 0x1B, 7: 0x141, 8: 0x128, 15: 0x140}
# At distance 4 of a reduction, four neighbouring lanes already have the same value, so mask 7 gives the same result as
# mask 4, and unlike it is a DPP permutation.
MIRROR = {4: 7}


@contextmanager
def launch(grid: Sequence[int], block: Sequence[int]) -> Iterator[tuple[Expr, ...]]:
    """`with launch((gx, gy), (tx, ty)) as (bx, by, tx, ty):` binds the grid's and the workgroup's axes (1 to 3 each, x
    first). One `launch` makes one kernel."""
    with ExitStack() as stack:
        axes = [f"{kind}.{axis}" for kind, of in (("blockIdx", grid), ("threadIdx", block)) for axis in AXES[: len(of)]]
        extents = zip(axes, (*grid, *block), strict=True)
        yield tuple(stack.enter_context(T.launch_thread(axis, extent)) for axis, extent in extents)


def each(arch: Device, count: int) -> Iterator[Expr]:
    """`for i in each(arch, n):` executes the body for 0 .. n-1. The code has n copies of the body; or a loop if the
    driver unrolls loops (`arch.unrolls`), so that it has less code to read."""
    if not arch.unrolls:
        yield from range(count)
        return
    with T.serial(count) as i:
        yield i


def barrier() -> None:
    """A barrier of the workgroup, after which all threads see the LDS writes before it (code generation adds the wait
    for these). TVM does not allow it inside an `if`; use `step.once` for a condition that is the same in all
    threads."""
    T.evaluate(T.tvm_storage_sync("shared"))


def wave_barrier() -> None:
    """A barrier of the lanes of a wave, for shared buffers of the scope WAVE_SHARED. Only on Vulkan. Waves of a
    workgroup may be on different paths."""
    T.evaluate(T.call_extern("void", "vk.wave_barrier"))


def intrin(dtype: str, name: str, *args: Expr) -> Expr:
    """The value of an LLVM intrinsic, in a register. It is declared to TVM as a call with side effects. Otherwise TVM
    would substitute the call for each use of its value: chains of calls would grow exponentially, and lane exchanges
    would move into branches where partner lanes are not active."""
    return T.Bind(T.call_llvm_intrin(dtype, name, *args))


def _vk(dtype: str, name: str, *args: Expr) -> Expr:
    """The value of a call "vk.*" of the SPIR-V generator, in a register."""
    return T.Bind(T.call_extern(dtype, f"vk.{name}", *args))


def word(x: Expr) -> Expr:
    """The bits of a float32 or uint32 as int32."""
    return x if str(x.ty) == "int32" else T.reinterpret("int32", x)


def wave_meets(arch: Device) -> None:
    """`wave_barrier` for both APIs. For rocm it emits no instruction, because the LDS operations of a wave are executed
    in order; it only prevents LLVM from reordering them."""
    if arch.api == "vulkan":
        wave_barrier()
    else:
        T.evaluate(T.call_llvm_intrin("void", "llvm.amdgcn.wave.barrier"))


# ---- arithmetic


def dot4(arch: Device, a: Expr, b: Expr, c: Expr) -> Expr:
    """c + the sum of the four products of the signed bytes of the words a and b; c and the result int32."""
    a, b = word(a), word(b)
    if arch.dot == "dot4":
        return T.Bind(_vk("int32", "dot4", a, b) + c)
    if arch.dot == "sudot4":
        return intrin("int32", "llvm.amdgcn.sudot4", T.bool(True), a, T.bool(True), b, c, T.bool(False))
    if arch.dot == "sdot4":
        return intrin("int32", "llvm.amdgcn.sdot4", a, b, c, T.bool(False))
    a, b = T.Bind(a), T.Bind(b)
    if arch.api == "vulkan":  # exact in float32, which has full rate on GPUs where 32-bit integer products do not
        total = T.float32(0)
        for i in range(4):
            total = fma(T.cast(_byte(a, i), "float32"), T.cast(_byte(b, i), "float32"), total)
        return T.Bind(c + T.cast(total, "int32"))
    for i in range(4):
        c = c + _byte(a, i) * _byte(b, i)
    return T.Bind(c)


def _byte(x: Expr, i: int) -> Expr:
    """Byte i of an int32, sign-extended to int32."""
    return T.shift_right(T.shift_left(x, T.int32(24 - 8 * i)), T.int32(24))


def dot2(arch: Device, a: Expr, b: Expr, c: Expr) -> Expr:
    """c + a[0]*b[0] + a[1]*b[1] of two words of two float16 each; c and the result float32."""
    a, b = (T.Bind(T.reinterpret("float16x2", x)) for x in (a, b))
    if arch.dot2:
        return intrin("float32", "llvm.amdgcn.fdot2", a, b, c, T.bool(False))
    for i in range(2):
        c = c + T.cast(T.Shuffle([a], [i]), "float32") * T.cast(T.Shuffle([b], [i]), "float32")
    return T.Bind(c)


def halves(x: Expr) -> list[Expr]:
    """The two float16 of a word as float32."""
    pair = T.Bind(T.reinterpret("float16x2", x))
    return [T.Bind(T.cast(T.Shuffle([pair], [i]), "float32")) for i in range(2)]


def fma(a: Expr, b: Expr, c: Expr) -> Expr:
    """a*b + c, rounded once; float32 or float16, scalars or vectors."""
    return intrin(str(c.ty), "llvm.fma", a, b, c)


def _float32(name: str) -> Callable[..., Expr]:
    """A function of float32 that is the LLVM intrinsic of that name, one instruction."""
    return lambda *args: intrin("float32", name, *args)


exp2 = _float32("llvm.amdgcn.exp2.f32")  # 2**x, relative error 2e-7; results below 2**-126 may be 0
rsqrt = _float32("llvm.amdgcn.rsq.f32")  # 1 / sqrt(x), relative error 1.2e-7
rcp = _float32("llvm.amdgcn.rcp.f32")  # 1 / x, relative error 1.2e-7
rint = _float32("llvm.rint")  # x rounded to a whole number, ties to even
# The larger and the smaller of two; if one is NaN, the other one. (T.max would become a comparison and a select.)
maximum = _float32("llvm.maxnum")
minimum = _float32("llvm.minnum")


def count_ones(x: Expr) -> Expr:
    """The number of bits that are set in a uint32, as int32."""
    return T.Bind(T.cast(intrin("uint32", "llvm.ctpop", x), "int32"))


# ---- lanes of a wave


def _across(x: Expr, call: Callable[[Expr], tuple[Expr, ...]]) -> Expr:
    """Applies an int32 intrinsic to the bits of the word x; the result has x's type. call(bits) returns (name,
    *arguments) of the intrinsic."""
    dtype = str(x.ty)
    bits = intrin("int32", *call(word(x)))
    return bits if dtype == "int32" else T.Bind(T.reinterpret(dtype, bits))


def lane_id(arch: Device) -> Expr:
    """This lane's number in its wave, int32."""
    if arch.api == "vulkan":
        return _vk("int32", "lane")
    low = intrin("int32", "llvm.amdgcn.mbcnt.lo", T.int32(-1), T.int32(0))
    return low if arch.wave == 32 else intrin("int32", "llvm.amdgcn.mbcnt.hi", T.int32(-1), low)


def uniform(arch: Device, x: Expr) -> Expr:
    """The word x of the first active lane, in a scalar register. For values that are the same in all lanes."""
    if arch.api == "vulkan":
        return _vk(str(x.ty), "broadcast_first", x) if arch.scalars else T.Bind(x)
    return _across(x, lambda bits: ("llvm.amdgcn.readfirstlane", bits))


def read_lane(x: Expr, lane: int) -> Expr:
    """The int32 word x of lane number `lane` (an int) as a scalar. Only for rocm."""
    return T.call_llvm_intrin("int32", "llvm.amdgcn.readlane", x, T.int32(lane))


def shuffle(arch: Device, x: Expr, lane: Expr) -> Expr:
    """The word x of lane number `lane` of the wave. lane: int32, may differ between lanes. It uses the LDS unit."""
    if arch.api == "vulkan":
        return _vk(str(x.ty), "shuffle", x, lane)
    return _across(x, lambda bits: ("llvm.amdgcn.ds.bpermute", lane * T.int32(4), bits))


def shuffle_xor(arch: Device, x: Expr, mask: int) -> Expr:
    """The word x of lane number (own number ^ mask). mask: 1 .. wave-1. Masks of DPP, and 16 on RDNA, do not use the
    LDS unit. Raises ValueError for masks outside of 1 .. wave-1."""
    if not 0 < mask < arch.wave:
        raise ValueError(f"no lane of a wave of {arch.wave} has a partner at distance {mask}")
    if arch.api == "vulkan":
        return _vk(str(x.ty), "shuffle_xor", x, T.int32(mask))
    if mask in DPP:
        return _permuted(x, DPP[mask])
    if mask == 16 and arch.wave == 32:
        # lane i of a row reads lane i of the other row
        lanes = T.int32(0x76543210), T.int32(0xFEDCBA98 - (1 << 32))
        return _across(
            x, lambda bits: ("llvm.amdgcn.permlanex16", T.int32(0), bits, *lanes, T.bool(False), T.bool(True))
        )
    return shuffle(arch, x, lane_id(arch) ^ T.int32(mask))


def _permuted(x: Expr, control: int) -> Expr:
    """The word x of another lane. control: a dpp_ctrl value of DPP."""
    all_rows, all_banks = T.int32(0xF), T.int32(0xF)
    return _across(
        x,
        lambda bits: ("llvm.amdgcn.update.dpp", T.int32(0), bits, T.int32(control), all_rows, all_banks, T.bool(True)),
    )


def computed_here(arch: Device, x: Expr) -> Expr:
    """The word x, computed at this place of the code. LLVM would move the computation of a value into the branch that
    uses it, even if its inputs need more registers than the value. A value that is read from a lane (here: the own
    lane) cannot be moved."""
    return x if arch.api == "vulkan" else _permuted(x, DPP[0])


def _reduced(
    arch: Device, x: Expr, name: str, op: Callable[[Expr, Expr], Expr], width: int | None, stride: int = 1
) -> Expr:
    """The reduction of x by `op` over `width` lanes that are `stride` apart, in all of these lanes. width: a power of
    two, by default the wave. op(x, y): commutative and associative, on words. name: of the reduction in "vk.reduce_*".
    All of these lanes must be active."""
    lanes, distance = (width or arch.wave) * stride, stride
    if arch.api == "vulkan" and width in (None, arch.wave):
        return _vk(str(x.ty), f"reduce_{name}", x)
    while distance < lanes:
        x = T.Bind(op(x, shuffle_xor(arch, x, MIRROR.get(distance, distance))))
        distance *= 2
    return x


def any_lane(arch: Device, x: Expr) -> Expr:
    """Whether the condition x holds in any lane of the wave, in all lanes."""
    if arch.api == "vulkan":
        return _vk("bool", "any", x)
    return T.Bind(intrin(f"int{arch.wave}", "llvm.amdgcn.ballot", x) != tirx.const(0, f"int{arch.wave}"))


def wave_sum(arch: Device, x: Expr, width: int | None = None, stride: int = 1) -> Expr:
    """The sum of x over `width` lanes (default: the wave) that are `stride` apart, with the same bits in all of
    them."""
    return _reduced(arch, x, "add", lambda a, b: a + b, width, stride)


def wave_max(arch: Device, x: Expr, width: int | None = None) -> Expr:
    """The maximum of x, float32 or int32, over `width` neighbouring lanes (default: the wave), in all of them."""
    return _reduced(arch, x, "max", T.max if str(x.ty) == "int32" else maximum, width)


def wave_min(arch: Device, x: Expr) -> Expr:
    """The minimum of x, int32, over the wave, in all lanes."""
    return _reduced(arch, x, "min", T.min, None)


def wave_scan(arch: Device, x: Expr, lane: Expr) -> tuple[Expr, Expr]:
    """(sum of x over the lanes with lower numbers, sum of x over all lanes). x: int32. lane: own number."""
    below = T.int32(0)
    for distance in (1 << i for i in range(arch.wave.bit_length() - 1)):
        other = opaque(shuffle_xor(arch, x, distance))
        below = opaque(below + T.Select((lane & distance) != 0, other, T.int32(0)))
        x = opaque(x + other)
    return below, x


# ---- memory


def memory_barrier(arch: Device) -> None:
    """A memory barrier for COHERENT parameters: other workgroups see this thread's accesses before it earlier than
    those after it. It emits nothing for rocm, where `Outbox` waits for stores, and a load cannot overtake an earlier
    load on which its address depends."""
    if arch.api == "vulkan":
        T.evaluate(T.call_extern("void", "vk.memory_barrier"))


# For `schedule_fence`: scalar, LDS and global memory instructions may cross; vector and matrix instructions may not.
IN_ORDER = 0x94


def schedule_fence(mask: int) -> None:
    """Limits LLVM's scheduler for AMD GPUs. mask: the instructions that may move across this place, as bits of
    llvm.amdgcn.sched.barrier."""
    T.evaluate(T.call_llvm_intrin("void", "llvm.amdgcn.sched.barrier", T.int32(mask)))
