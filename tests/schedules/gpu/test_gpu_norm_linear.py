"""RMS norms that linear layers of few tokens prepare and complete, run in the ISA emulator, against numpy; and the rule
when they do (`norm_place.py`)."""

from dataclasses import replace

import numpy as np
import pytest
from samples import sample
from spirv_emulation import execute
from workloads import built, gate_up_op, linear_op

from mlc_amd.compiler.codegen.rocm import compile_hsaco
from mlc_amd.runtime.exchange_layout import EMPTY
from mlc_amd.schedules.formats import FORMATS
from mlc_amd.schedules.gpu.base import profiles
from mlc_amd.schedules.gpu.base.arch import resolve
from mlc_amd.schedules.gpu.exchange.exchange import exchange
from mlc_amd.schedules.gpu.linear.deferred_norm import MARGIN
from mlc_amd.schedules.gpu.linear.norm_place import place
from mlc_amd.schedules.operators import AllReduce, Operator
from mlc_amd.tools.reference import operators
from mlc_amd.tools.reference.activations import in_layout, read
from mlc_amd.tools.reference.case import Case
from tests.dev.gfxemu import emulate
from tests.schedules.gpu.test_gpu_gemv import ARCH_NAMES, TOLERANCE, activations, check_no_spills, weights

EPS, COLUMNS = 1e-5, 32  # columns of a sum of squares


def emulated(op: Operator, arch: str, arrays: dict, wave_order=3):
    """Runs the operator's kernel on arrays; the emulator's result."""
    module = compile_hsaco({"k": built(op, resolve(arch), "k")}, resolve(arch))
    check_no_spills(module)
    (result,) = emulate(module, "k", arrays, wave_order)
    return result


def state(m: int) -> dict:
    return {"state": np.array([m, m, 0, 0], np.int32)}


def check_prepared(arch: str, fmt: str, m: int, n: int, k: int, run=emulated):
    """A layer with bias and residual that stores its result x, x * G in blocks, and sums of squares."""
    kind, rng = FORMATS[fmt].kind, np.random.default_rng(5)
    x, arrays = activations(k, kind, m)
    w, planes = weights(fmt, n, k, 1, "W0_")
    scale = np.abs(x @ w.T).max()
    arrays |= planes | state(m) | {"bias0": (rng.standard_normal(n) * scale).astype(np.float32)}
    arrays |= {"R": (rng.standard_normal((m, n)) * scale).astype(np.float32)}
    arrays |= {"NG": rng.standard_normal(n).astype(np.float32), "Y0": np.full((m, n), np.nan, np.float32)}
    arrays |= {"An": np.zeros((m, n // 32, 32), np.int8), "Sn": np.full((m, n // 32, 4), np.nan, np.float32)}
    arrays["NewSquares"] = np.full((m, n // COLUMNS), np.nan, np.float32)
    op = linear_op([(fmt, n)], k, m, "rows" if kind == "int8" else "", (True,), True, norm_out="rows")
    result = run(op, arch, arrays)
    y = x @ w.T + arrays["bias0"] + arrays["R"]
    assert np.abs(arrays["Y0"] - y).max() <= TOLERANCE * np.abs(y).max()
    np.testing.assert_allclose(arrays["NewSquares"], (y**2).reshape(m, -1, COLUMNS).sum(-1), rtol=1e-4)
    q, s, scaled = arrays["An"].astype(np.int64), arrays["Sn"], (y * arrays["NG"]).reshape(m, -1, 32)
    top = np.abs(scaled).max(-1, keepdims=True)
    assert (np.abs(q * s[..., :1] - scaled) <= 0.501 * top / 127 + TOLERANCE * top.max()).all()
    sums = np.stack([q.sum(-1), q[..., :16].sum(-1), q[..., 16:].sum(-1)], -1)
    np.testing.assert_allclose(s[..., 1:], s[..., :1] * sums, rtol=1e-6)
    return result


def check_completed(arch: str, fmt: str, m: int, k: int, run=emulated):
    """Two segments, and gate and up, of an input that the layer before prepared."""
    rng, results = np.random.default_rng(6), []
    x, inputs = activations(k, "int8", m)
    inputs |= state(m) | {"Squares": (rng.random((m, k // COLUMNS)) * 900).astype(np.float32)}
    normed = x / np.sqrt(inputs["Squares"].astype(np.float64).sum(-1, keepdims=True) / k + EPS)
    segments, parts, expected = [(fmt, 32), ("q8_0", 21)], {}, []
    for i, (name, n) in enumerate(segments):
        w, planes = weights(name, n, k, i, f"W{i}_")
        parts |= planes | {f"Y{i}": np.full((m, -(-n // 16) * 16), np.nan, np.float32)}
        expected.append(normed @ w.T)
    parts["bias1"] = rng.standard_normal(21).astype(np.float32)
    expected[1] = expected[1] + parts["bias1"]
    arrays = inputs | parts
    op = linear_op(segments, k, m, "rows", (False, True), norm_in=EPS)
    results.append(run(op, arch, arrays))
    reference = operators.results(Case(op, arrays, "gpu", np.arange(m)))  # of `selftest`
    for i, y in enumerate(expected):
        for found in (arrays[f"Y{i}"][:, : y.shape[1]], reference[f"Y{i}"].value):
            assert np.abs(found - y).max() <= TOLERANCE * np.abs(y).max()
    (g, gate), (u, up) = weights(fmt, 32, k, 1, "G_"), weights("q4_0", 32, k, 2, "U_")
    arrays = inputs | gate | up | {"Y": np.full((m, 32), np.nan, np.float32)}
    results.append(run(gate_up_op(fmt, "q4_0", 32, k, m, "rows", "", norm_in=EPS), arch, arrays))
    a, b = normed @ g.T, normed @ u.T
    y = a / (1 + np.exp(-a)) * b
    assert np.abs(arrays["Y"] - y).max() <= 2 * TOLERANCE * np.abs(y).max()
    return results


def check_lanes(arch: str, fmt: str, m: int, run=emulated):
    """In the layout "lanes": a layer that prepares the norm of its result, and one that completes it."""
    target = profiles.resolve(arch) if arch in profiles.PROFILES else resolve(arch)
    lanes, n, k, rng = f"lanes:{target.lane_blocks}", 96, 256, np.random.default_rng(5)
    (w, planes), x = weights(fmt, n, k, 1, "W0_"), rng.standard_normal((m, k)).astype(np.float16)
    residual = (1000 * rng.standard_normal((m, n))).astype(np.float32)  # whose squares float16 would hold badly
    before = (1 / np.sqrt((residual**2).mean(-1) + EPS)).astype(np.float32)  # the factors of an earlier norm
    g, y = rng.standard_normal(n).astype(np.float32), np.full((m, n), np.nan, np.float32)
    hidden, squares = in_layout(lanes, np.zeros((m, n))), np.full((m, n // 16), np.nan, np.float32)
    arrays = state(m) | planes | {"H": in_layout(lanes, x), "R": residual, "NG": g, "NS": before}
    arrays |= {"Y0": y, "Hn": hidden, "NewSquares": squares}
    run(linear_op([(fmt, n)], k, m, lanes, residual=True, norm_out=lanes), arch, arrays)
    exact = x.astype(np.float64) @ w.T + residual
    assert np.abs(y - exact).max() <= 1e-3 * np.abs(exact).max()
    np.testing.assert_allclose(squares, (y.astype(np.float64) ** 2).reshape(m, -1, 16).sum(-1), rtol=1e-5)
    prepared = read(lanes, {"H": hidden}, rows=np.arange(m))[:, :n]
    scaled = y * g * before[:, None] * MARGIN
    assert np.abs(prepared - scaled).max() <= 2**-11 * np.abs(scaled).max()

    own = 1 / np.sqrt((y.astype(np.float64) ** 2).mean(-1) + EPS)
    normed = prepared.astype(np.float64) / before[:, None] / MARGIN * own[:, None]
    inputs = state(m) | {"H": hidden, "Squares": squares, "Scale": before, "NewScale": np.full(m, np.nan, np.float32)}
    segments, out = [("q4_0", 41), ("q8_0", 16)], {}
    for i, (name, rows) in enumerate(segments):
        w, planes = weights(name, rows, n, 2 + i, f"W{i}_")
        inputs, out[f"Y{i}"] = inputs | planes, (np.full((m, -(-rows // 16) * 16), np.nan, np.float32), normed @ w.T)
    run(linear_op(segments, n, m, lanes, norm_in=EPS), arch, inputs | {name: y for name, (y, _) in out.items()})
    np.testing.assert_allclose(inputs["NewScale"], own, rtol=1e-5)
    for y, exact in out.values():
        assert np.abs(y[:, : exact.shape[1]] - exact).max() <= 1e-3 * np.abs(exact).max()


def as_spirv(op: Operator, profile: str, arrays: dict) -> None:
    """Instead of `emulated`, in the SPIR-V emulator, which finds lanes that race."""
    target = profiles.resolve(profile)
    execute(built(op, target), arrays, target)


@pytest.mark.parametrize(("m", "profile"), sample([(1, "rdna3"), (8, "rdna3"), (1, "gfx90c:dot=dot4")], [(1, "rdna3")]))
def test_norms_as_vulkan_gpus_get_them(m, profile):
    check_prepared(profile, "q4_0", m, 32, 512, as_spirv)
    check_completed(profile, "q4_0", m, 512, as_spirv)


@pytest.mark.parametrize(
    ("arch", "m"), sample([(arch, m) for arch in ("rdna3", "rdna4", "nvidia") for m in (8, 24)], [("rdna3", 24)])
)
def test_norms_of_the_layout_lanes_on_vulkan(arch, m):
    check_lanes(arch, "q4_0", m, as_spirv)


def check_exchange(target, layout: str, m: int, inline: bool, run):
    """A sum of two GPUs that prepares its norm, with the words of the other GPU in memory, or copied. run(kernel,
    arrays)."""
    layout = f"lanes:{target.lane_blocks}" if layout == "lanes" else layout
    n, rng = 160, np.random.default_rng(7)
    op = AllReduce(m=m, n=n, parts=2, residual=True, norm_out=layout)
    parts = rng.integers(-99, 99, (2, m, n)).astype(np.float32)  # float16 has them
    arrays = state(m) | {"X": parts[1], "R": rng.standard_normal((m, n)).astype(np.float32), "P": parts}
    arrays |= {"NG": rng.standard_normal(n).astype(np.float32), "NS": rng.random(m).astype(np.float32)}
    names = ["Y", "P", *(["An", "Sn"] if layout == "rows" else ["Hn"]), "NewSquares"]
    results = {name: np.zeros(*of) for name, of in zip(names, op.results(), strict=True)}
    kernel, arrays = built(op, target, "k"), results | arrays
    if inline:
        kernel, words = exchange(op, m * n // 4, target, "k"), parts[0].astype(np.float16).view(np.int64)
        inbox, arrays["Outbox0"] = (np.full((2, m * n // 4), EMPTY, np.int64) for _ in range(2))
        inbox[1] = words.reshape(-1)
        arrays |= {"Inbox": inbox, "P": np.zeros_like(parts), "Control": np.array([0, 0, 1, 0], np.int32)}
    run(kernel, arrays)
    expected = operators.results(Case(op, arrays | {"P": parts}, "gpu", np.arange(m)))
    np.testing.assert_array_equal(arrays["Y"], arrays["R"] + parts[0] + parts[1])
    np.testing.assert_allclose(arrays["NewSquares"], expected["NewSquares"].value, rtol=1e-5)
    name, error = ("", 0.501 / 127) if layout == "rows" else ("Hn", 2**-11)
    found, scaled = read(layout, arrays, "n", np.arange(m))[:, :n], expected[name].value
    assert np.abs(found - scaled).max() <= error * np.abs(scaled).max()


@pytest.mark.parametrize("inline", [True, False], ids=["inline", "copied"])
@pytest.mark.parametrize(
    ("layout", "m", "profile"), [("rows", 1, "rdna3"), ("rows", 2, "vangogh"), ("lanes", 8, "nvidia")]
)
def test_sums_that_prepare_norms_on_vulkan(inline, layout, m, profile):
    target = profiles.resolve(profile)
    check_exchange(target, layout, m, inline, lambda kernel, arrays: execute(kernel, arrays, target))


@pytest.mark.emulator
@pytest.mark.parametrize("inline", [True, False], ids=["inline", "copied"])
@pytest.mark.parametrize(
    ("layout", "m", "arch"), [("rows", 1, "gfx1100"), ("rows", 2, "gfx90a"), ("lanes", 8, "gfx1201")]
)
def test_sums_that_prepare_norms_in_the_emulator(emulator, linker, inline, layout, m, arch):
    def run(kernel, arrays):
        module = compile_hsaco({"k": kernel}, resolve(arch))
        check_no_spills(module)
        emulate(module, "k", {param.name: arrays[param.name] for param in kernel.params}, 3)

    check_exchange(resolve(arch), layout, m, inline, run)


PLACES = {
    "gfx1100": ("deferred", "deferred"),
    "gfx1151": ("deferred", "deferred"),
    "gfx90a": ("deferred", "deferred"),
    "gfx942": ("computed", "computed"),  # 304 compute units for 128 blocks of 32 rows
    "rdna3": ("deferred", "deferred"),
    "nvidia": ("computed", "computed"),
    "vangogh": ("launch", "launch"),  # all workgroups read the sums of squares at 88 GB/s
    "lavapipe": ("launch", "launch"),
}


@pytest.mark.parametrize("name", PLACES)
def test_where_norms_are_computed(name):
    """Of a row of Llama 3 8B: that after the output projection, and that after the down projection."""
    arch = profiles.resolve(name) if name in profiles.PROFILES else resolve(name)
    o, down = (linear_op([("q4_0", 4096)], k, 1, "rows", residual=True) for k in (4096, 14336))
    gate_up = gate_up_op("q4_0", "q4_0", 14336, 4096, 1, "rows", "rows")
    qkv = linear_op([("q4_0", 4096), ("q4_0", 1024), ("q4_0", 1024)], 4096, 1, "rows")
    assert (place(o, (gate_up,), arch), place(down, (qkv,), arch)) == PLACES[name]
    assert place(None, (qkv,), resolve("gfx1100")) == "launch"  # no layer before it
    slow = replace(arch, bandwidth=1) if name == "rdna3" else None
    assert slow is None or place(o, (gate_up,), slow) == "launch"


def test_norms_of_half_of_a_70b_model():
    """After the sums of two GPUs; in whole layers twice as many workgroups read the sums of squares."""
    arch = profiles.resolve("nvidia")
    lanes, sums = f"lanes:{arch.lane_blocks}", AllReduce(m=16, n=8192, parts=2, residual=True)
    half, whole = (gate_up_op("q4_0", "q4_0", n, 8192, 16, lanes, lanes) for n in (14336, 28672))
    assert (place(sums, (half,), arch), place(sums, (whole,), arch)) == ("deferred", "launch")


@pytest.mark.full
@pytest.mark.emulator
@pytest.mark.parametrize("arch", ARCH_NAMES)
@pytest.mark.parametrize("m", [1, 2, 8])
@pytest.mark.parametrize("fmt", ["q4_0", "q4_k", "q6_k", "mxfp4"])
def test_norms_of_the_layout_rows(arch, m, fmt):
    check_prepared(arch, fmt, m, 64, 4096 if m == 1 else 512)
    check_completed(arch, fmt, m, 4096 if m == 1 else 512)


@pytest.mark.full
@pytest.mark.emulator
@pytest.mark.parametrize("arch", ["gfx90a", *ARCH_NAMES])
@pytest.mark.parametrize("m", [24, 64])
def test_norms_of_the_layout_lanes(arch, m):
    check_lanes(arch, "q4_k", m)


@pytest.mark.full
@pytest.mark.emulator
@pytest.mark.parametrize("arch", ["gfx90a", *ARCH_NAMES])
def test_float_weights_and_odd_numbers_of_sums(arch):
    check_prepared(arch, "f16", 1, 32, 256)
    check_completed(arch, "q4_0", 1, 3 * 32)
    check_completed(arch, "q5_1", 1, 12288)
