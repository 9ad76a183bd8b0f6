"""Device intrinsics of the GPU kernels: what TVMScript's builder has no name for, per arch.

Everything here is called while an IRBuilder prim_func is open and emits code there. Functions that return a value
return it bound to a register (`T.Bind`). Words are 32 bits: int32, uint32 or float32 scalars of a lane. Lanes of a wave
are consecutive threadIdx.x, then y, z.

`arch.api` says what is emitted: "rocm" AMD's instructions; "vulkan" calls named "vk.*", which the SPIR-V generator
knows. It knows the arithmetic of both by LLVM's names.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from tvm import tirx
from tvm.tirx.script import builder as T

from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.registers import opaque
from mlc_amd.schedules.tir import Expr

AXES = "xyz"
# attribute of a kernel: names of parameters that workgroups of one launch exchange data through
COHERENT = "mlc_amd.coherent"
# of shared memory through which only lanes of one wave meet: TVM adds no barriers of the workgroup there
WAVE_SHARED = "shared.wave"

# Data parallel primitives (DPP): lane permutations that are part of a vector instruction, as dpp_ctrl values of LLVM's
# AMDGPU backend, by the mask of lane ^ mask: quad_perm, row_half_mirror, row_ror:8, row_mirror.
DPP = {0: 0xE4, 1: 0xB1, 2: 0x4E, 3: 0x1B, 7: 0x141, 8: 0x128, 15: 0x140}
# in a reduction groups of four have one value by then: the mirror image of eight lanes is as good, and it is DPP
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
    """`for i in each(arch, n):` 0, .., n-1: n copies of the body, or a loop where the driver unrolls it (small code, in
    any case for it to read)."""
    if not arch.unrolls:
        yield from range(count)
        return
    with T.serial(count) as i:
        yield i


def barrier() -> None:
    """Waits until all threads of the workgroup are here and see each other's LDS writes (code generation adds the wait
    for those). Not inside an `if`: TVM refuses that; a uniform condition can be a loop of 0 or 1 steps."""
    T.evaluate(T.tvm_storage_sync("shared"))


def wave_barrier() -> None:
    """As `barrier`, among the lanes of a wave only, for shared buffers of the scope WAVE_SHARED. On Vulkan; also where
    waves of a workgroup go different ways."""
    T.evaluate(T.call_extern("void", "vk.wave_barrier"))


def intrin(dtype: str, name: str, *args: Expr) -> Expr:
    """The value of an LLVM intrinsic, in a register. For TVM it has side effects (not for LLVM): it would substitute
    the expression wherever a bound pure call is used, which makes chains of them explode, and move lane exchanges
    into branches where partner lanes are not active."""
    return T.Bind(T.call_llvm_intrin(dtype, name, *args))


def _vk(dtype: str, name: str, *args: Expr) -> Expr:
    """The value of a call that the SPIR-V generator knows, in a register."""
    return T.Bind(T.call_extern(dtype, f"vk.{name}", *args))


def word(x: Expr) -> Expr:
    """The bits of a float32 or uint32 as int32."""
    return x if str(x.ty) == "int32" else T.reinterpret("int32", x)


def wave_meets(arch: Device) -> None:
    """As `wave_barrier`, on either API. On AMD's own LDS operations of a wave are in order: no instruction, it only
    tells LLVM that those before are for other lanes to see."""
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
    if arch.api == "vulkan":  # exact in float32, and at full rate where 32-bit products are not
        total = T.float32(0)
        for i in range(4):
            total = fma(T.cast(_byte(a, i), "float32"), T.cast(_byte(b, i), "float32"), total)
        return T.Bind(c + T.cast(total, "int32"))
    for i in range(4):
        c = c + _byte(a, i) * _byte(b, i)
    return T.Bind(c)


def _byte(x: Expr, i: int) -> Expr:
    """Byte i of an int32 with its sign."""
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
# The larger and the smaller of two, the other one if one is not a number; T.max becomes a comparison and a select.
maximum = _float32("llvm.maxnum")
minimum = _float32("llvm.minnum")


def count_ones(x: Expr) -> Expr:
    """How many bits of a uint32 are set, as int32."""
    return T.Bind(T.cast(intrin("uint32", "llvm.ctpop", x), "int32"))


# ---- lanes of a wave


def _across(x: Expr, call: Callable[[Expr], tuple[Expr, ...]]) -> Expr:
    """The intrinsic call(bits) -> (name, *arguments) of the bits of the word x, in a register of x's type."""
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
    """The first active lane's word in all lanes, in a scalar register: for what is the same in all lanes anyway."""
    if arch.api == "vulkan":
        return _vk(str(x.ty), "broadcast_first", x) if arch.scalars else T.Bind(x)
    return _across(x, lambda bits: ("llvm.amdgcn.readfirstlane", bits))


def read_lane(x: Expr, lane: int) -> Expr:
    """The int32 word x of lane number `lane` (an int) as a scalar. On AMD's own API."""
    return T.call_llvm_intrin("int32", "llvm.amdgcn.readlane", x, T.int32(lane))


def shuffle(arch: Device, x: Expr, lane: Expr) -> Expr:
    """The word x of lane number `lane` of the wave (int32, may differ per lane). Through the LDS unit."""
    if arch.api == "vulkan":
        return _vk(str(x.ty), "shuffle", x, lane)
    return _across(x, lambda bits: ("llvm.amdgcn.ds.bpermute", lane * T.int32(4), bits))


def shuffle_xor(arch: Device, x: Expr, mask: int) -> Expr:
    """The word x of the lane whose number differs by `mask`, 1..wave-1. Without LDS: masks in DPP, on RDNA also 16."""
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
    """The word x of the lane that `control` (of DPP) names."""
    all_rows, all_banks = T.int32(0xF), T.int32(0xF)
    return _across(
        x,
        lambda bits: ("llvm.amdgcn.update.dpp", T.int32(0), bits, T.int32(control), all_rows, all_banks, T.bool(True)),
    )


def computed_here(arch: Device, x: Expr) -> Expr:
    """The word x. On AMD's own API LLVM would compute what is only used under a condition there, though what it is
    computed of takes more registers; the value of another lane, and be it this one, it has to know before."""
    return x if arch.api == "vulkan" else _permuted(x, DPP[0])


def _reduced(
    arch: Device, x: Expr, name: str, op: Callable[[Expr, Expr], Expr], width: int | None, stride: int = 1
) -> Expr:
    """op over `width` (a power of two, default: the wave) lanes that are `stride` apart, the same in all of them.
    `op(x, y)` is commutative and associative, on float32, int32 or uint32 words; name: its on Vulkan. All of these
    lanes must be active."""
    lanes, distance = (width or arch.wave) * stride, stride
    if arch.api == "vulkan" and width in (None, arch.wave):
        return _vk(str(x.ty), f"reduce_{name}", x)
    while distance < lanes:
        x = T.Bind(op(x, shuffle_xor(arch, x, MIRROR.get(distance, distance))))
        distance *= 2
    return x


def any_lane(arch: Device, x: Expr) -> Expr:
    """Whether the condition x holds in a lane, the same in all of them."""
    if arch.api == "vulkan":
        return _vk("bool", "any", x)
    return T.Bind(intrin(f"int{arch.wave}", "llvm.amdgcn.ballot", x) != tirx.const(0, f"int{arch.wave}"))


def wave_sum(arch: Device, x: Expr, width: int | None = None, stride: int = 1) -> Expr:
    """The sum over `width` lanes (default: the wave) that are `stride` apart, the same bits in all of them."""
    return _reduced(arch, x, "add", lambda a, b: a + b, width, stride)


def wave_max(arch: Device, x: Expr, width: int | None = None) -> Expr:
    """The largest float32 or int32 of `width` neighbouring lanes (default: the wave), in all of them."""
    return _reduced(arch, x, "max", T.max if str(x.ty) == "int32" else maximum, width)


def wave_min(arch: Device, x: Expr) -> Expr:
    """The smallest int32 of the wave, in all lanes."""
    return _reduced(arch, x, "min", T.min, None)


def wave_scan(arch: Device, x: Expr, lane: Expr) -> tuple[Expr, Expr]:
    """(the sum of the int32 x of all lanes below this one, that of all lanes)."""
    below = T.int32(0)
    for distance in (1 << i for i in range(arch.wave.bit_length() - 1)):
        other = opaque(shuffle_xor(arch, x, distance))
        below = opaque(below + T.Select((lane & distance) != 0, other, T.int32(0)))
        x = opaque(x + other)
    return below, x


# ---- memory


def memory_barrier(arch: Device) -> None:
    """This thread's accesses to COHERENT parameters before it happen before those after it, as other workgroups see
    them. Nothing on AMD's own API, where `Outbox` waits for stores, and loads whose address depends on an earlier load
    cannot overtake it."""
    if arch.api == "vulkan":
        T.evaluate(T.call_extern("void", "vk.memory_barrier"))


IN_ORDER = 0x94  # for `schedule_fence`: scalar, LDS and global memory instructions may cross, vector and matrix may not


def schedule_fence(mask: int) -> None:
    """Tells LLVM's scheduler for AMD what may move across here (bits of llvm.amdgcn.sched.barrier)."""
    T.evaluate(T.call_llvm_intrin("void", "llvm.amdgcn.sched.barrier", T.int32(mask)))
