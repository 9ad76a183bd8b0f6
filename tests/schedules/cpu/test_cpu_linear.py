"""Linear layers and gate/up with SwiGLU on the CPU, on every instruction set that this machine runs, against numpy: a
sample of formats, most on the best one; marked full, all formats.

The oracle: gguf-py's dequantized weights times the dequantized int8 activations, in float64.
"""

import functools
import os
from dataclasses import replace
from typing import NamedTuple

import gguf_blocks
import numpy as np
import pytest
import tvm
from workloads import tiled

from mlc_amd.compiler.codegen.cpu import build_module
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.host import cpu_flags
from mlc_amd.schedules.cpu.base.arch import Arch, Avx2, AvxVnni, Isa, Portable, Vnni512, resolve
from mlc_amd.schedules.cpu.linear.linear import gate_up, linear
from mlc_amd.schedules.cpu.linear.linear_plan import default_plan, parts
from mlc_amd.schedules.formats import FORMATS
from mlc_amd.schedules.operators import GateUp, Linear

os.environ.setdefault("TVM_NUM_THREADS", "2")  # before the first kernel call

INT8 = [name for name in gguf_blocks.DISTINCT if FORMATS[name].kind == "int8"]
# each way in which weights come to a dot product
SAMPLE = ("q4_0", "q5_1", "q8_0", "q2_k", "q4_k", "q6_k", "iq4_xs", "mxfp4", "iq1_m")
FEWER = ("q4_0", "q4_k", "q6_k", "mxfp4")  # on the other machines: codes, minima, two planes of bits, a codebook
COMPILED = ("q4_0", "q2_k", "q6_k")  # for machines that cannot run them
FLOAT = [name for name, fmt in FORMATS.items() if fmt.kind == "float"]
TOLERANCE = 1e-5  # of the largest result


class Machine(NamedTuple):
    """An instruction set, compiled for a cpu, and the flags of /proc/cpuinfo that running it takes."""

    isa: Isa
    mcpu: str
    flags: tuple

    def arch(self, p):
        """With activation tiles of p rows."""
        return tiled(Arch(self.mcpu, self.mcpu, self.isa, ()), p)


AVX512 = ("avx512bw", "avx512vl", "avx512_vnni", "avx512_vbmi2")
MACHINES = {
    "vnni512": Machine(Vnni512, "icelake-server", AVX512),
    "avxvnni": Machine(AvxVnni, "alderlake", ("avx_vnni",)),
    "vnni512vl": Machine(AvxVnni, "icelake-server", AVX512),  # the same 256-bit instruction in AVX512's encoding
    "avx2": Machine(Avx2, "x86-64-v3", ("avx2", "fma", "f16c")),
    "portable": Machine(Portable, "x86-64-v2", ("sse4_2",)),
}
RUNNABLE = [name for name, machine in MACHINES.items() if cpu_flags().issuperset(machine.flags)]
COMPILE_ONLY = [name for name in MACHINES if name not in RUNNABLE]


def workload(segments, k, m=1, biases=(False,), residual=False):
    return Linear(segments=tuple(segments), k=k, m=m, layout="", biases=biases, residual=residual)


class Case(NamedTuple):
    """One linear kernel: see `linear`."""

    segments: tuple
    k: int = 256
    m: int = 1
    p: int = 1
    biases: tuple = (False,)
    residual: bool = False
    unpack: int = 0  # tiles of tokens from which on weights are unpacked first

    def kernel(self, machine, name):
        op = workload(self.segments, self.k, self.m, self.biases, self.residual)
        arch = machine.arch(self.p)
        return linear(op, arch, name, replace(default_plan(op, arch), unpack=self.unpack) if self.m > 1 else None)


@functools.cache
def _cases(isa):
    """All cases of an instruction set by name."""
    cases = {}
    for i, name in enumerate(INT8):
        cases[f"{name}-decode"] = Case(((name, 37),), 512)
        p = min((4, 8, 16)[i % 3], isa.tokens)
        cases[f"{name}-prefill"] = Case(((name, 48),), 256 if i % 2 else 512, 16, p, unpack=1)
    for name in FLOAT:
        cases[f"{name}-decode"] = Case(((name, 37),), 102)
        cases[f"{name}-prefill"] = Case(((name, 48),), 102, 16, isa.tokens)
    for step, m, p in (("decode", 1, 1), ("prefill", 16, 8)):
        p = min(p, isa.tokens)
        cases[f"mixed-{step}"] = Case((("q4_k", 96), ("q6_k", 37), ("q8_0", 16)), 256, m, p, (True, True, False))
        cases[f"residual-{step}"] = Case((("q4_0", 41),), 256, m, p, (True,), True)
    for name in ("q4_0", "q4_k", "f16"):
        cases[f"few-{name}-prefill"] = Case(((name, 48),), 256, 16, isa.tokens)
    cases["float-mixed-prefill"] = Case((("f16", 33), ("f32", 16)), 64, 16, 8, (True, False))
    return cases


# name -> (gate format, up format, m, p, quantize, activation)
SWIGLU = {
    "int8-decode": ("q4_k", "q6_k", 1, 1, True, "silu"),
    "int8-prefill": ("q4_0", "q4_0", 16, 8, True, "silu"),
    "int8-decode-f32": ("q8_0", "q8_0", 1, 1, False, "silu"),
    "int8-prefill-f32": ("q6_k", "q4_k", 16, 4, False, "silu"),
    "float-decode": ("f16", "f16", 1, 1, True, "silu"),
    "float-prefill": ("bf16", "f32", 16, 8, False, "silu"),
    "gelu-decode": ("q4_0", "q4_0", 1, 1, True, "gelu"),
    "gelu-prefill": ("f16", "f16", 16, 8, False, "gelu"),
    "relu-prefill": ("q8_0", "q8_0", 4, 4, False, "relu"),
    "relu_sq-decode": ("q8_0", "q8_0", 1, 1, False, "relu_sq"),
}
FEWER_SWIGLU = ("int8-decode", "int8-prefill", "gelu-prefill")
# GGML's definitions, in float64
ACTIVATIONS = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: 0.5 * x * (1 + np.tanh(0.79788456080286535588 * x * (1 + 0.044715 * x * x))),
    "relu": lambda x: np.maximum(x, 0),
    "relu_sq": lambda x: np.maximum(x, 0) ** 2,
}
F, SWIGLU_K = 96, 256
# AvxVnni's two machines share its kernels: each has those that the other leaves out.
HALVES_OF_KERNELS = {"avxvnni": 0, "vnni512vl": 1}


def kernels_of(machine, rest=False) -> list[str]:
    """Names of the kernels to test on a machine; where they are only compiled, a few. rest: those that only tests
    marked full run."""
    if machine not in RUNNABLE:
        return [f"{fmt}-{step}" for fmt in COMPILED for step in ("decode", "prefill")] + ["swiglu-int8-prefill"]
    names = [*_cases(MACHINES[machine].isa), *(f"swiglu-{name}" for name in SWIGLU)]
    if machine == RUNNABLE[0]:
        left_out = {f"{fmt}-{step}" for fmt in {*INT8} - {*SAMPLE} for step in ("decode", "prefill")}
    else:
        left_out = {name for name in names if name.startswith("swiglu") or "mixed" in name or "residual" in name}
        left_out |= {f"{fmt}-{step}" for fmt in {*INT8, "f32", "bf16"} - {*FEWER} for step in ("decode", "prefill")}
        left_out -= {f"swiglu-{name}" for name in FEWER_SWIGLU}
    if rest:
        return [name for name in names if name in left_out]
    names = [name for name in names if name not in left_out]
    half = HALVES_OF_KERNELS.get(machine)
    # decode and prefill alternate: of one format the one, of the next the other
    return [name for i, name in enumerate(names) if half in (None, (i + i // 2) % 2)]


@functools.cache
def module(machine, name):
    """A module with the function "kernel"."""
    isa, mcpu, _ = MACHINES[machine]
    if name in _cases(isa):
        kernel = _cases(isa)[name].kernel(MACHINES[machine], "kernel")
    else:
        gate, up, m, p, quantize, act = SWIGLU[name.removeprefix("swiglu-")]
        sizes = {"gate": gate, "up": up, "n": F, "k": SWIGLU_K, "m": m, "act": act}
        op = GateUp(layout_in="", layout="tiles" if quantize else "", **sizes)
        kernel = gate_up(op, MACHINES[machine].arch(min(p, isa.tokens)), "kernel")
    return build_module({"kernel": kernel}, tvm.target.Target({"kind": "llvm", "mcpu": mcpu}))


def on_machines(names, prefix="") -> list:
    """(machine that runs here, name) of all `names` whose kernels it has."""
    return [
        pytest.param(machine, name, marks=pytest.mark.full if rest else ())
        for machine in RUNNABLE
        for rest in (False, True)
        for name in names
        if prefix + name in kernels_of(machine, rest)
    ]


def weights(name, n, k, seed):
    """A random weight: its planes and the float32 matrix [n, k] that gguf-py makes of the same blocks."""
    return gguf_blocks.weights(name, n, k, seed, "tile16")


def quantized(x, p):
    """The activation planes A, S of x [m, k] in tiles of p, and the values that they stand for."""
    m, k = x.shape
    blocks = x.reshape(m, k // 32, 32)
    d = (np.abs(blocks).max(-1) / 127).astype(np.float32)
    q = np.rint(blocks / d[..., None]).astype(np.int8)
    return (tile(q, p), sums(tile(q, p), tile(d, p))), (q * d[..., None]).reshape(m, k)


def tile(x, p):
    """[m, KB, ...] to [m/p, KB, p, ...]."""
    return np.ascontiguousarray(x.reshape(-1, p, *x.shape[1:]).swapaxes(1, 2))


def sums(q, d):
    """S of A = q [MT, KB, P, 32] and the scales d [MT, KB, P]."""
    halves = [part.sum(-1, dtype=np.int32) for part in (q, q[..., :16], q[..., 16:])]
    scaled, bits = (
        [f(s) for s in halves] for f in (lambda s: (s * d).astype(np.float32), lambda s: (-s).view(np.float32))
    )
    return np.ascontiguousarray(np.stack([d, scaled[0], bits[0], *scaled[1:], *bits[1:], 0 * d], 2))


def activations(kind, m, k, p, scale=1):
    """Parameters of random activations (A and S, or X) and the float32 values [m, k] that they stand for."""
    x = np.random.default_rng(1).standard_normal((m, k), np.float32) * np.float32(scale)
    return quantized(x, p) if kind == "int8" else ((x,), x)


def call(machine, name, *arrays):
    """Runs a kernel on numpy arrays; returns them as it left them."""
    tensors = [tvm.runtime.tensor(np.ascontiguousarray(a)) for a in arrays]
    module(machine, name)["kernel"](*tensors)
    return [t.numpy() for t in tensors]


def state(live):
    return np.array([5, live, 0, 0], np.int32)


def run_linear(machine, name, live):
    """Results of a linear kernel and what they should be: lists of [m, n]. Results start as NaN."""
    case = _cases(MACHINES[machine].isa)[name]
    rng = np.random.default_rng(3)
    inputs, x = activations(FORMATS[case.segments[0][0]].kind, case.m, case.k, case.p)
    arrays, expected, outputs = [state(live), *inputs], [], []
    for i, ((fmt, n), bias) in enumerate(zip(case.segments, case.biases, strict=True)):
        planes, w = weights(fmt, n, case.k, i)
        arrays += planes.values()
        y = x.astype(np.float64) @ w.astype(np.float64).T
        if bias:
            arrays.append(rng.standard_normal(n, np.float32))
            y += arrays[-1]
        expected.append(y)
        outputs.append(np.full((case.m, -(-n // 16) * 16), np.nan, np.float32))
    if case.residual:
        arrays.append(rng.standard_normal(outputs[0].shape, np.float32))
        expected[0] += arrays[-1][:, : expected[0].shape[1]]
    results = call(machine, name, *arrays, *outputs)[-len(outputs) :]
    return [y[:, : e.shape[1]] for y, e in zip(results, expected, strict=True)], expected


def error(got, expected):
    return np.abs(got - expected).max() / np.abs(expected).max()


@pytest.mark.parametrize(("machine", "name"), on_machines(_cases(MACHINES[RUNNABLE[0]].isa)))
def test_linear(machine, name):
    for got, expected in zip(*run_linear(machine, name, live=16), strict=True):
        assert error(got, expected) < TOLERANCE


@pytest.mark.parametrize("live", [1, 2, 3, 4, 5, 9, 13])
@pytest.mark.parametrize(
    ("machine", "name"), on_machines([f"{fmt}-prefill" for fmt in ("few-q4_0", "few-q4_k", "few-f16", "mixed", "f16")])
)
def test_linear_computes_the_part_of_a_tile_that_holds_the_live_rows(machine, name, live):
    """Bit for bit the rows of a full step, and no rows but those of the smallest part."""
    case = _cases(MACHINES[machine].isa)[name]
    whole, rest = (live - 1) // case.p * case.p, (live - 1) % case.p + 1
    # unpacked weights meet whole tiles
    computed = whole + (next(size for size in parts(case.p) if size >= rest) if not case.unpack else case.p)
    full, _ = run_linear(machine, name, case.m)
    for got, expected in zip(run_linear(machine, name, live)[0], full, strict=True):
        np.testing.assert_array_equal(got[:live], expected[:live])
        assert np.isnan(got[computed:]).all()


def test_a_row_of_float32_weights_has_the_same_bits_alone_and_in_a_chunk():
    """So a router chooses the same experts however rows come."""
    arch, k, n, m, rng = resolve("native"), 96, 32, 8, np.random.default_rng(0)
    tile = {"one": 1, "chunk": m}
    made = {name: linear(workload([("f32", n)], k, p), arch, name) for name, p in tile.items()}
    built = build_module(made, arch.target)
    x, w = rng.standard_normal((m, k), np.float32), rng.standard_normal((n // 16, k, 16), np.float32)

    def result(name, rows):
        tensors = [tvm.runtime.tensor(a) for a in (state(len(rows)), rows, w, np.zeros((len(rows), n), np.float32))]
        built[name](*tensors)
        return tensors[-1].numpy()

    alone = np.concatenate([result("one", x[i : i + 1]) for i in range(m)])
    np.testing.assert_array_equal(alone, result("chunk", x))


@pytest.mark.parametrize("live", [1, 3, 4, 7])
@pytest.mark.parametrize(("machine", "name"), on_machines(["int8-prefill", "int8-prefill-f32"], "swiglu-"))
def test_gate_up_of_few_rows_gives_the_bits_of_many(machine, name, live):
    gate, up, m, p, quantize, _ = SWIGLU[name]
    p = min(p, MACHINES[machine].isa.tokens)
    planes = [plane for i, fmt in enumerate((gate, up)) for plane in weights(fmt, F, SWIGLU_K, i)[0].values()]
    inputs, _ = activations(FORMATS[gate].kind, m, SWIGLU_K, p)
    results = []
    for rows in (live, m):
        outputs = quantized(np.ones((m, F), np.float32), p)[0] if quantize else (np.zeros((m, F), np.float32),)
        results.append(call(machine, f"swiglu-{name}", state(rows), *inputs, *planes, *outputs)[-len(outputs) :])
    for few, many in zip(*results, strict=True):
        if quantize:  # rows of tiles to rows; the last field of S is never written
            axis = 2 if few.dtype == np.int8 else 3
            few, many = (np.moveaxis(x, axis, 1).reshape(m, *np.delete(x.shape, (0, axis))) for x in (few, many))
        np.testing.assert_array_equal(few[:live].view(np.uint8), many[:live].view(np.uint8))


@pytest.mark.parametrize(("machine", "name"), on_machines(SWIGLU, "swiglu-"))
def test_gate_up_swiglu(machine, name):
    gate, up, m, p, quantize, act = SWIGLU[name]
    p = min(p, MACHINES[machine].isa.tokens)
    (gate_planes, g), (up_planes, u) = weights(gate, F, SWIGLU_K, 1), weights(up, F, SWIGLU_K, 2)
    # gates of a size at which the sigmoid bends
    inputs, x = activations(FORMATS[gate].kind, m, SWIGLU_K, p, scale=3 / np.sqrt((g**2).sum(1).mean()))
    g, u = (x.astype(np.float64) @ w.astype(np.float64).T for w in (g, u))
    expected = ACTIVATIONS[act](g) * u
    outputs = quantized(np.ones((m, F), np.float32), p)[0] if quantize else (np.full((m, F), np.nan, np.float32),)
    results = call(machine, f"swiglu-{name}", state(m), *inputs, *gate_planes.values(), *up_planes.values(), *outputs)[
        -len(outputs) :
    ]
    if not quantize:
        assert error(results[0], expected) < TOLERANCE
        return
    A, S = results
    d = S[:, :, 0]
    amax = np.abs(tile(expected.reshape(m, -1, 32), p)).max(-1)
    np.testing.assert_allclose(d, amax / 127, rtol=1e-4)
    assert (np.abs(A * d[..., None] - tile(expected.reshape(m, -1, 32), p)) < 0.502 * d[..., None]).all()
    again = sums(A, d)
    np.testing.assert_array_equal(S[:, :, [2, 5, 6]].view(np.int32), again[:, :, [2, 5, 6]].view(np.int32))
    np.testing.assert_allclose(S[:, :, [1, 3, 4]], again[:, :, [1, 3, 4]], rtol=1e-6)


@pytest.mark.parametrize(
    ("machine", "name"), [(machine, name) for machine in COMPILE_ONLY for name in kernels_of(machine)]
)
def test_compiles_for_other_machines(machine, name):
    assert "vpdpbusd" in module(machine, name).inspect_source("asm")


def test_avx2_for_avx512_without_vnni():
    """x86-64-v4 has no integer dot product: Avx2's kernels serve it."""
    kernel = linear(workload([("q4_0", 16)], 256), resolve("x86-64-v4"), "f")
    asm = build_module({"f": kernel}, tvm.target.Target({"kind": "llvm", "mcpu": "x86-64-v4"})).inspect_source("asm")
    assert "vpmaddubsw" in asm and "vpdpbusd" not in asm


@pytest.mark.parametrize(
    "segments, m, p, biases, residual",
    [
        ([("q4_0", 32), ("f16", 32)], 1, 1, (False, False), False),
        ([("q4_0", 32), ("q4_0", 32)], 1, 1, (False, False), True),
        ([("q4_0", 32)], 12, 8, (False,), False),
    ],
)
def test_what_cannot_share_a_launch_is_refused(segments, m, p, biases, residual):
    with pytest.raises(ValueError, match="a launch"):
        linear(workload(segments, 256, m, biases, residual), MACHINES["vnni512"].arch(p), "f")


def test_too_large_a_weight_is_refused():
    with pytest.raises(UserError, match="too large"):
        linear(workload([("q8_0", 1 << 20)], 1 << 12), MACHINES["vnni512"].arch(1), "f")
