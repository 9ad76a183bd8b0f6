"""The instruction sets of the CPU kernels: how int8 weights times int8 activations become int32 sums, one row to a
lane.

A register holds four consecutive columns of each of `lanes` rows (a lane is a row: sums never cross lanes). A kernel
hands `dot` some of the eight registers of a 32-column block, and for each the matching four activations of a token as
one int32. The classes are namespaces, never instantiated:

    lanes          rows of a register
    registers      vector registers that the machine has
    mcpu           an LLVM cpu that has the instructions (any newer one will do)
    tokens         tokens of a prefill tile that suit the register file
    interleave     tokens whose dot products are interleaved, see linear.PrefillPlan
    sums_in_registers    whether the sums of all rows of a prefill tile are, or those of many in memory
    task, unpack   of prefill's linear layers: KB of a task, and tiles of tokens, see linear.PrefillPlan
    rows, sums, convert    of prefill attention: rows, registers and convert of attention_prefill.Plan
    ahead          bytes that a decode kernel prefetches ahead of its loads, 0: none
    signed_zero    what `signed` and `lookup` add to signed weights: dot(signed(w), a) = sum(w*a) + signed_zero*sum(a)
    step(top)      registers that `dot` may take in one call when no code exceeds `top` (None: weights from `signed` or
                   `lookup`)
    signed(x)      signed bytes (given as uint8) in the form that `dot` takes
    keep(w)        what `signed`, `lookup` or an unsigned weight gave, as the bytes to keep in memory
    kept(x)        from such bytes of a signed or looked-up weight: the form that `dot` takes
    lookup(t, x)   table entries t[x] (8 or 16 signed bytes) for codes x (uint8, 0..7 or 15) in the form that `dot`
                   takes
    half(x, n)     n lanes of finite float16 as float32
    exp2(x, n)     2**x of n lanes of float32, see vector.exp2
    dot(s, w, a)   s[t][r] + sum over i of w[r][i]*a[t][i] for each token t and row register r: s int32 per lane, w
                   registers, a int32 scalars of four int8 each, not below -127

`Arch` is an architecture by its `--arch` name: which LLVM cpu to compile for, its instruction set, and the CPU flags
that a machine must have to run the code.
"""

from dataclasses import dataclass

import tvm
from tvm.target import codegen
from tvm.tirx.script import builder as T

from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.host import cpu_flags
from mlc_amd.schedules.cpu.base.vector import exp2, exp2_avx512, half_bits, intrin, pin, splat, widen

INT16_MAX, ACT_MAX = 32767, 127
QUADS = 8  # registers of a block of 32 columns


def _table(values, n, kind):
    """`n` bytes that repeat the 8 or 16 of `values`: pshufb looks up within 16 bytes."""
    return T.Shuffle([T.Cast(kind, T.int32(v)) for v in values] * (n // len(values)), [T.int32(i) for i in range(n)])


def _pairs_step(top):
    """How many registers' products fit in int16 pairs: each adds up to two products of `top` and 127."""
    return 1 if top is None else min(QUADS, INT16_MAX // (2 * top * ACT_MAX))


def _outer(weights, acts, cast, pair):
    """int16 sums over i of pair(weights[r][i], cast(acts[t][i])), as [t][r]: an activation is broadcast once for all
    row registers."""
    totals = [[None] * len(weights) for _ in acts]
    for i in range(len(weights[0])):
        for total, quads in zip(totals, acts, strict=True):
            a = T.Bind(cast(splat(quads[i], 8)))
            for r, w in enumerate(weights):
                product = pair(w[i], a)
                total[r] = product if total[r] is None else T.Bind(total[r] + product)
    return totals


class Vnni512:
    """AVX512-VNNI (with BW and DQ): vpdpbusd multiplies unsigned by signed bytes and adds four products to each int32
    lane."""

    lanes, registers, mcpu = 16, 32, "icelake-server"
    tokens, interleave, task, unpack, ahead = 16, 8, 512, 4, 4096
    rows, sums, convert = 4, 24, 1
    sums_in_registers = True
    signed_zero = 128
    half, exp2 = staticmethod(widen), staticmethod(exp2_avx512)

    @staticmethod
    def step(top):
        return 1  # nothing can overflow; several rows' chains interleave at this grain

    @classmethod
    def signed(cls, x):
        return pin(x ^ splat(T.uint8(128), 4 * cls.lanes), 4 * cls.lanes)

    @staticmethod
    def keep(w):
        return w

    kept = keep

    @classmethod
    def lookup(cls, table, x):
        n = 4 * cls.lanes
        shuffle = "llvm.x86.avx512.pshuf.b.512" if n == 64 else "llvm.x86.avx2.pshuf.b"
        found = intrin(
            f"int8x{n}", shuffle, _table([v ^ -128 for v in table], n, "int8"), T.reinterpret(f"int8x{n}", x)
        )
        return pin(T.reinterpret(f"uint8x{n}", found), n)

    @classmethod
    def dot(cls, sums, weights, acts):
        n, totals = cls.lanes, list(sums)
        for i in range(len(weights[0])):
            for t, quads in enumerate(acts):
                a = T.Bind(T.reinterpret(f"int8x{4 * n}", splat(quads[i], n)))
                totals[t] = [
                    intrin(f"int32x{n}", f"llvm.x86.avx512.vpdpbusd.{32 * n}", x, w[i], a)
                    for x, w in zip(totals[t], weights, strict=True)
                ]
        return totals


class Zen4(Vnni512):
    """The same on a Zen 4, which multiplies one vector of 512 bits in a cycle, not two; in the same cycle it can load
    two scalars to broadcast, or convert from float16."""

    mcpu, task, unpack = "znver4", 256, 8
    rows, sums, convert = 8, 8, 0


class AvxVnni(Vnni512):
    """AVX-VNNI (or AVX512VL-VNNI): the same instruction on 256 bits."""

    lanes, registers, mcpu, interleave, task = 8, 16, "alderlake", 4, 256
    rows, sums, convert = 6, 12, 1
    sums_in_registers = False
    exp2 = staticmethod(exp2)


class Avx2:
    """AVX2 (and AVX512 without VNNI): vpmaddubsw makes int16 sums of two products; several are added before they widen
    to int32."""

    lanes, registers, mcpu = 8, 16, "x86-64-v3"
    tokens, interleave, task, unpack, ahead = 16, 4, 256, 4, 4096
    rows, sums, convert = 6, 12, 1
    sums_in_registers = False
    signed_zero = 0
    step, half, exp2 = staticmethod(_pairs_step), staticmethod(widen), staticmethod(exp2)

    @staticmethod
    def signed(x):
        """|w| and w: |w| times the activation with w's sign is w times the activation, and 2*128*127 still fits in
        int16."""
        w = T.Bind(T.reinterpret("int8x32", x))
        return pin(T.reinterpret("uint8x32", intrin("int8x32", "llvm.x86.avx2.psign.b", w, w)), 32), w

    @staticmethod
    def keep(w):
        return T.reinterpret("uint8x32", w[1]) if isinstance(w, tuple) else w

    kept = signed

    @staticmethod
    def lookup(table, x):
        found = intrin("int8x32", "llvm.x86.avx2.pshuf.b", _table(table, 32, "int8"), T.reinterpret("int8x32", x))
        return Avx2.signed(T.reinterpret("uint8x32", found))

    @staticmethod
    def dot(sums, weights, acts):
        def pair(w, a):
            if isinstance(w, tuple):
                w, a = w[0], intrin("int8x32", "llvm.x86.avx2.psign.b", a, w[1])
            return intrin("int16x16", "llvm.x86.avx2.pmadd.ub.sw", w, a)

        totals = _outer(weights, acts, lambda a: T.reinterpret("int8x32", a), pair)
        return [
            [
                T.Bind(s + intrin("int32x8", "llvm.x86.avx2.pmadd.wd", x, splat(T.int16(1), 16)))
                for s, x in zip(*both, strict=True)
            ]
            for both in zip(sums, totals, strict=True)
        ]


class Portable:
    """No intrinsics: int16 products of the even and of the odd bytes, for any machine that LLVM knows. Signed weights
    are a 1-tuple."""

    lanes, registers, mcpu = 8, 16, "x86-64-v2"
    tokens, interleave, task, unpack, ahead = 4, 1, 256, 4, 0
    rows, sums, convert = 6, 12, 1
    sums_in_registers = True
    signed_zero = 0
    step, half, exp2 = staticmethod(_pairs_step), staticmethod(half_bits), staticmethod(exp2)

    @staticmethod
    def signed(x):
        return (x,)

    @staticmethod
    def keep(w):
        return w[0] if isinstance(w, tuple) else w

    kept = signed

    @staticmethod
    def lookup(table, x):
        """A tree of selections by the bits of x, lowest first; by masks, for selections of bytes by booleans take LLVM
        10 seconds."""
        values = [splat(T.Cast("uint8", T.int32(v & 255)), 32) for v in table]
        for bit in range(len(table).bit_length() - 1):
            taken = pin(splat(T.uint8(0), 32) - (T.shift_right(x, splat(T.uint8(bit), 32)) & splat(T.uint8(1), 32)), 32)
            values = [
                pin(even ^ ((even ^ odd) & taken), 32) for even, odd in zip(values[::2], values[1::2], strict=True)
            ]
        return (values[0],)

    @staticmethod
    def dot(sums, weights, acts):
        def halves(x, signed):  # the even and the odd bytes of an int16 vector
            eight = splat(T.int16(8), 16)
            return (
                T.shift_right(T.shift_left(x, eight), eight) if signed else x & splat(T.int16(255), 16)
            ), T.shift_right(x, eight)

        def pair(w, a):
            signed = isinstance(w, tuple)
            w = T.Bind(T.reinterpret("int16x16", w[0] if signed else w))
            (even, odd), (a_even, a_odd) = halves(w, signed), halves(a, True)
            return T.Bind(even * a_even + odd * a_odd)

        def wide(x):
            x, sixteen = T.Bind(T.reinterpret("int32x8", x)), splat(T.int32(16), 8)
            return T.shift_right(T.shift_left(x, sixteen), sixteen) + T.shift_right(x, sixteen)

        totals = _outer(weights, acts, lambda a: T.reinterpret("int16x16", a), pair)
        return [[T.Bind(s + wide(x)) for s, x in zip(*both, strict=True)] for both in zip(sums, totals, strict=True)]


Isa = type[Vnni512] | type[Avx2] | type[Portable]  # an instruction set

# ---- architectures

# The names that `--help` and errors show; any other cpu that LLVM knows works too.
LEVELS = ("x86-64-v4", "x86-64-v3", "x86-64-v2")
CPUS = ("znver1", "znver2", "znver3", "znver4", "znver5", "haswell", "alderlake", "icelake-server")
NAMES = ("native", *reversed(LEVELS), *CPUS)

# Cpus whose best tile sizes differ from those of others with the same instructions.
OWN = {"znver4": Zen4}

# The best first: (LLVM features, instruction set)
ISAS = (
    (("avx512vnni", "avx512bw", "avx512dq"), Vnni512),
    (("avxvnni",), AvxVnni),
    (("avx2", "fma", "f16c"), Avx2),
    ((), Portable),
)

# LLVM feature: the flag in /proc/cpuinfo. What a machine must have of these is recorded in the artifact.
FLAGS = {
    "sse4.2": "sse4_2", "avx": "avx", "avx2": "avx2", "fma": "fma", "f16c": "f16c", "avxvnni": "avx_vnni",
    "avx512f": "avx512f", "avx512bw": "avx512bw", "avx512dq": "avx512dq", "avx512vl": "avx512vl",
    "avx512vnni": "avx512_vnni",
}  # fmt: skip


@dataclass(frozen=True)
class Arch:
    name: str  # as the user named it; "native" becomes the cpu's own name
    mcpu: str  # LLVM's name
    isa: Isa
    flags: tuple[str, ...]  # /proc/cpuinfo flags that the code needs

    api = "cpu"

    @property
    def needs(self) -> dict:
        """What a candidate asks of a machine."""
        return {"flags": list(self.flags)}

    @property
    def target(self) -> tvm.target.Target:
        return tvm.target.Target({"kind": "llvm", "mcpu": self.mcpu})


def _arch(name: str, mcpu: str) -> Arch:
    target = tvm.target.Target({"kind": "llvm", "mcpu": mcpu})
    has = {feature for feature in FLAGS if codegen.llvm_cpu_has_features([feature], target)}
    isa = OWN.get(mcpu) or next(isa for needs, isa in ISAS if has.issuperset(needs))
    return Arch(name, mcpu, isa, tuple(FLAGS[f] for f in FLAGS if f in has))


def resolve(name: str = "native") -> Arch:
    """The architecture of that name. UserError for a name that LLVM does not know."""
    triple = codegen.llvm_get_system_triple()
    if name in ("native", "auto"):
        cpu, host = codegen.llvm_get_system_cpu(), cpu_flags()
        # A hypervisor may hide features of the CPU that LLVM recognizes: then the best level that the flags allow.
        if not host:
            return _arch(cpu, cpu)
        candidates = [_arch(name, name) for name in (cpu, *LEVELS)]
        return next((arch for arch in candidates if host.issuperset(arch.flags)), candidates[-1])
    if not codegen.llvm_is_valid_cpu(name, triple):
        raise UserError(f"unknown CPU arch '{name}'; use one of {', '.join(NAMES)} or another cpu name of LLVM")
    if not codegen.llvm_cpu_has_features(["64bit"], tvm.target.Target({"kind": "llvm", "mcpu": name})):
        raise UserError(f"CPU arch '{name}' has 32 bits only, kernels need 64; use one of {', '.join(NAMES)}")
    return _arch(name, name)


def tile_rows(m: int, arch: Arch) -> int:
    """Rows of an activation tile, also of kernels whose activations are not laid out in tiles."""
    return min(m, arch.isa.tokens)
