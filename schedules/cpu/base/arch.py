"""The instruction sets of CPUs: how a kernel multiplies int8 weights by int8 activations to int32 sums. And `Arch`, the
CPU architecture that an `--arch` name means.

A weight register holds four consecutive columns of each of `lanes` rows. A lane is a row, so no sum crosses lanes. A
kernel passes to `dot` some of the eight registers of a block of 32 columns and, for each register, the four
activations of a token that belong to its columns, as one int32.

The classes of instruction sets are namespaces and are never instantiated. They have:

    lanes          rows in a register
    registers      number of vector registers
    mcpu           an LLVM cpu that has the instructions; newer ones have them too
    tokens         tokens of a prefill tile, chosen for the number of registers
    interleave     see linear_plan.PrefillPlan
    sums_in_registers    whether prefill keeps the sums of all rows of a tile in registers; false: in memory
    task, unpack   see linear_plan.PrefillPlan
    rows, sums, convert    the fields rows, registers and convert of attention_prefill.Plan
    ahead          bytes that a decode kernel prefetches ahead of its loads; 0: none
    signed_zero    a constant that `signed` and `lookup` add to weights: dot(signed(w), a) = sum(w*a) +
                   signed_zero*sum(a)
    step(top)      number of registers that one call of `dot` may take without overflow. top: the largest code; None:
                   weights from `signed` or `lookup`
    signed(x)      the form that `dot` takes of signed bytes, which are given as uint8
    lookup(t, x)   the form that `dot` takes of t[x]. t: a table of 8 or 16 signed bytes; x: codes, uint8
    keep(w)        the bytes to store in memory for unsigned codes, or for a result of `signed` or `lookup`
    kept(x)        the form that `dot` takes of bytes that `keep` returned for a result of `signed` or `lookup`
    half(x, n)     n lanes of finite float16 as float32
    exp2(x, n)     2**x of n lanes of float32, see vector.exp2
    dot(s, w, a)   s[t][r] + sum over i of w[r][i]*a[t][i], for each token t and row register r. s: int32 vectors; w:
                   registers; a: int32 scalars of four int8 each, which are not below -127
"""

from dataclasses import dataclass

import tvm
from tvm.target import codegen
from tvm.tirx.script import builder as T

from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.host import cpu_flags
from mlc_amd.schedules.cpu.base.vector import exp2, exp2_avx512, half_bits, intrin, pin, splat, widen

INT16_MAX, ACT_MAX = 32767, 127
QUADS = 8  # registers in a block of 32 columns


def _table(values, n, kind):
    """A vector of `n` bytes that repeats the 8 or 16 `values`, because pshufb looks up within 16 bytes."""
    return T.Shuffle([T.Cast(kind, T.int32(v)) for v in values] * (n // len(values)), [T.int32(i) for i in range(n)])


def _pairs_step(top):
    """The number of registers whose products can be added in int16: each adds at most two products of `top` and
    127."""
    return 1 if top is None else min(QUADS, INT16_MAX // (2 * top * ACT_MAX))


def _outer(weights, acts, cast, pair):
    """The int16 sums over i of pair(weights[r][i], cast(acts[t][i])), as [t][r]. An activation is broadcast once for
    all row registers."""
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
        return 1  # nothing can overflow; with one register a call, the sums of several tokens and rows interleave

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
    """AVX512-VNNI on Zen 4, with other tile sizes: it multiplies one 512-bit vector in a cycle, not two. In the same
    cycle it can load and broadcast two scalars, or convert from float16."""

    mcpu, task, unpack = "znver4", 256, 8
    rows, sums, convert = 8, 8, 0


class AvxVnni(Vnni512):
    """AVX-VNNI (or AVX512VL-VNNI): vpdpbusd on 256 bits."""

    lanes, registers, mcpu, interleave, task = 8, 16, "alderlake", 4, 256
    rows, sums, convert = 6, 12, 1
    sums_in_registers = False
    exp2 = staticmethod(exp2)


class Avx2:
    """AVX2 (and AVX512 without VNNI): vpmaddubsw adds two products to an int16; several of these are added before they
    are widened to int32."""

    lanes, registers, mcpu = 8, 16, "x86-64-v3"
    tokens, interleave, task, unpack, ahead = 16, 4, 256, 4, 4096
    rows, sums, convert = 6, 12, 1
    sums_in_registers = False
    signed_zero = 0
    step, half, exp2 = staticmethod(_pairs_step), staticmethod(widen), staticmethod(exp2)

    @staticmethod
    def signed(x):
        """(|w|, w). `dot` multiplies |w| by sign(w) * activation, which is w * activation; 2*128*127 fits in int16."""
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
    """Without intrinsics, for any machine that LLVM supports: int16 products of the even bytes and of the odd bytes.
    `signed` and `lookup` return a 1-tuple, from which `dot` knows that bytes are signed."""

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
        """A tree of selections by the bits of x, the lowest first. It selects by masks, because LLVM takes 10 seconds
        to compile selections of bytes by booleans."""
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

# The names that `--help` and error messages show; any other cpu name of LLVM works too.
LEVELS = ("x86-64-v4", "x86-64-v3", "x86-64-v2")
CPUS = ("znver1", "znver2", "znver3", "znver4", "znver5", "haswell", "alderlake", "icelake-server")
NAMES = ("native", *reversed(LEVELS), *CPUS)

# CPUs whose best tile sizes differ from those of others with the same instructions
OWN = {"znver4": Zen4}

# (LLVM features, instruction set that needs them), the best first
ISAS = (
    (("avx512vnni", "avx512bw", "avx512dq"), Vnni512),
    (("avxvnni",), AvxVnni),
    (("avx2", "fma", "f16c"), Avx2),
    ((), Portable),
)

# LLVM feature to the flag in /proc/cpuinfo. An artifact records which of these flags a machine must have.
FLAGS = {
    "sse4.2": "sse4_2", "avx": "avx", "avx2": "avx2", "fma": "fma", "f16c": "f16c", "avxvnni": "avx_vnni",
    "avx512f": "avx512f", "avx512bw": "avx512bw", "avx512dq": "avx512dq", "avx512vl": "avx512vl",
    "avx512vnni": "avx512_vnni",
}  # fmt: skip


@dataclass(frozen=True)
class Arch:
    """A CPU architecture for which kernels are compiled."""

    name: str  # the name that the user gave; for "native" the cpu's name
    mcpu: str  # LLVM's name of the cpu
    isa: Isa
    flags: tuple[str, ...]  # flags of /proc/cpuinfo that a machine must have to run the code

    api = "cpu"

    @property
    def needs(self) -> dict:
        """The key `needs` of a candidate (runtime/measure/candidate.py)."""
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
    """The architecture of this name. Raises UserError for a name that LLVM does not know, or a cpu without 64 bits."""
    triple = codegen.llvm_get_system_triple()
    if name in ("native", "auto"):
        cpu, host = codegen.llvm_get_system_cpu(), cpu_flags()
        # A hypervisor may hide features of the CPU that LLVM recognizes. Then take the best level that the flags allow.
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
    """Rows of an activation tile for steps of m rows. Kernels whose activations have no tiles use the same number."""
    return min(m, arch.isa.tokens)
