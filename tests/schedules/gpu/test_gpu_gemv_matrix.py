"""GEMVs of 8 to 32 tokens on int8 matrix units, run in the ISA emulator, against numpy; see test_gpu_gemv."""

import gguf_blocks
import numpy as np
import pytest
from samples import sample
from workloads import gate_up_op, linear_op

from mlc_amd.compiler.codegen.rocm import compile_hsaco
from mlc_amd.schedules.formats import FORMATS
from mlc_amd.schedules.gpu.base.arch import ARCHS, resolve
from mlc_amd.schedules.gpu.linear.gemv_matrix import (
    ROWS,
    Plan,
    default_plan,
    fitted,
    gate_up_swiglu,
    lds_bytes,
    linear,
    suits,
)
from mlc_amd.schedules.space import space
from tests.dev.gfxemu import emulate
from tests.schedules.gpu.test_gpu_gemv import (
    ARCH_NAMES,
    TOLERANCE,
    activations,
    check_no_spills,
    run_kernel,
    state,
    weights,
)

INT8 = [name for name in gguf_blocks.DISTINCT if FORMATS[name].kind == "int8"]
UNITS = ("gfx908", "gfx90a", "gfx942", "gfx1100", "gfx1201")


def run_linear(arch, segments, k, m, biases=None, residual=False, plan=None, wave_order="fwd"):
    biases = biases or (False,) * len(segments)
    kernel = linear(linear_op(segments, k, m, "rows", biases, residual), resolve(arch), "linear", plan)
    return run_kernel(kernel, arch, segments, k, m, biases, residual, wave_order)


def run_gate_up(arch, gate, up, f, k, m, layout):
    target = resolve(arch)
    module = compile_hsaco({"g": gate_up_swiglu(gate_up_op(gate, up, f, k, m, "rows", layout), target, "g")}, target)
    check_no_spills(module)
    x, arrays = activations(k, "int8", m)
    (g, gate_planes), (u, up_planes) = weights(gate, f, k, 1, "G_"), weights(up, f, k, 2, "U_")
    # so that silu is neither 0 nor the identity
    shrink = np.float32(2.0 ** -np.ceil(np.log2(np.abs(x @ g.T).max() / 8)))
    x, arrays = x * shrink, arrays | {"S": arrays["S"] * shrink} | gate_planes | up_planes | state()
    a, b = x @ g.T, x @ u.T
    y = a / (1 + np.exp(-a)) * b
    if layout == "":
        out = {"Y": np.full((m, f), np.nan, np.float32)}
    else:
        out = {"A_out": np.zeros((m, f // 32, 32), np.int8), "S_out": np.full((m, f // 32, 4), np.nan, np.float32)}
    emulate(module, "g", arrays | out, wave_order=2)
    if layout == "":
        assert np.abs(out["Y"] - y).max() <= TOLERANCE * np.abs(y).max()
        return
    q, s, y = out["A_out"].astype(np.int64), out["S_out"], y.reshape(m, -1, 32)
    top = np.abs(y).max(2, keepdims=True)
    assert (np.abs(q * s[..., :1] - y) <= 0.501 * top / 127 + TOLERANCE * top.max()).all()
    sums = np.stack([q.sum(2), q[..., :16].sum(2), q[..., 16:].sum(2)], 2)
    np.testing.assert_allclose(s[..., 1:], s[..., :1] * sums, rtol=1e-6)


@pytest.mark.full
@pytest.mark.emulator
@pytest.mark.parametrize("arch", ARCH_NAMES)
@pytest.mark.parametrize("m", ROWS)
@pytest.mark.parametrize("fmt", INT8)
def test_formats(arch, m, fmt):
    run_linear(arch, [(fmt, 40)], 1024, m, plan=Plan(2, 4), wave_order=3)


@pytest.mark.full
@pytest.mark.emulator
@pytest.mark.parametrize("arch", ["gfx1100", "gfx90a"])
@pytest.mark.parametrize(("fmt", "k"), [("q4_0", 32), ("q8_0", 96), ("q4_0", 5120), ("q6_k", 2304), ("mxfp4", 64)])
def test_columns(arch, fmt, k):
    """Steps of one to eight blocks, shared out evenly or not."""
    run_linear(arch, [(fmt, 16)], k, 8)


@pytest.mark.full
@pytest.mark.emulator
@pytest.mark.parametrize("arch", ARCH_NAMES)
def test_segments(arch):
    run_linear(arch, [("q4_k", 64), ("q5_0", 21), ("q6_k", 16)], 512, 8, (True, True, False), wave_order=1)
    run_linear(arch, [("q4_0", 37)], 256, 16, (True,), True)
    run_linear(arch, [("q5_1", 37), ("q3_k", 48)], 256, 32, (True, False))


@pytest.mark.full
@pytest.mark.emulator
@pytest.mark.parametrize("arch", ARCH_NAMES)
@pytest.mark.parametrize(
    "case",
    [
        ("q4_0", "q4_0", 64, 512, 8, "rows"),
        ("q4_k", "q4_k", 32, 768, 16, "rows"),
        ("q3_k", "q3_k", 32, 256, 8, ""),
        ("q8_0", "q6_k", 64, 512, 32, "rows"),
    ],
)
def test_gate_up_swiglu(arch, case):
    run_gate_up(arch, *case)


def hold_everything_in_registers(arch, fmts, m):
    """Compiles a linear and a gate/up kernel of each format for m tokens, at a model's number of columns."""
    target, kernels = resolve(arch), {}
    for fmt in fmts:
        kernels[fmt] = linear(linear_op([(fmt, 64)], 4096, m, "rows", (False,), False), target, fmt, Plan(2, 8))
        name = f"gate_up_{fmt}"
        kernels[name] = gate_up_swiglu(gate_up_op(fmt, fmt, 64, 4096, m, "rows", "rows"), target, name)
    check_no_spills(compile_hsaco(kernels, target))


@pytest.mark.parametrize("arch", sample(["gfx1100", "gfx1201"], ["gfx1100"]))
def test_the_most_tokens_fit_registers(arch):
    """Of the formats that load most at once, in bits and in scales."""
    hold_everything_in_registers(arch, ("q4_0", "q4_k", "q8_0"), ROWS[-1])


@pytest.mark.full
@pytest.mark.emulator
@pytest.mark.parametrize("m", ROWS)
@pytest.mark.parametrize("arch", UNITS)
def test_all_formats_fit_registers(arch, m):
    hold_everything_in_registers(arch, INT8, m)


def test_which_kernels_are_on_matrix_units():
    op = linear_op([("q4_0", 16)], 256, 8, "rows")
    assert {name for name, arch in ARCHS.items() if suits(op, arch)} == {
        name for name, arch in ARCHS.items() if arch.matrix
    }
    arch = resolve("gfx1100")
    assert suits(linear_op([("q4_0", 16), ("q6_k", 16)], 256, 16, "rows"), arch)
    for fmts, m, layout in ((["q4_0", "f16"], 8, "rows"), (["q4_0"], 4, "rows"), (["q4_0"], 16, "half")):
        assert not suits(linear_op([(fmt, 16) for fmt in fmts], 256, m, layout), arch)
        with pytest.raises(ValueError):
            linear(linear_op([(fmt, 16) for fmt in fmts], 256, m, layout, (False,) * len(fmts), False), arch, "linear")
    with pytest.raises(ValueError, match="whole blocks"):
        gate_up_swiglu(gate_up_op("q4_0", "q4_0", 48, 256, 8, "rows", "rows"), arch, "gate_up")


def test_plans():
    """Of a launch's columns as many waves as have a step; tuning knows the plans that fit LDS."""
    arch = resolve("gfx1100")

    def op(m, k=4096, fmt="q4_0", n=4096):
        return linear_op([(fmt, n)], k, m, "rows")

    assert fitted(Plan(2, 8), op(8, 96), arch) == (Plan(2, 2), 1)
    assert fitted(Plan(2, 8), op(8), arch) == (Plan(2, 8), 8)
    assert fitted(Plan(2, 8), op(32), arch) == fitted(Plan(2, 8), op(16, fmt="q8_0"), arch) == (Plan(2, 8), 4)
    assert default_plan(op(8), arch).tiles == 2 and default_plan(op(8, n=512), arch).tiles == 1
    found = space(op(8), arch)
    assert found.default == default_plan(op(8), arch) and len(found.plans) == 12
    assert lds_bytes(op(8), Plan(4, 8), 8) == 20480
