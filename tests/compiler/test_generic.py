"""Operators without a kernel of their own: fused with one another, compiled and right on every target."""

import math

import numpy as np
import pytest
from tvm import relax, te
from vulkan_harness import gpu

from mlc_amd.compiler import ops
from mlc_amd.compiler.ops import shape_of
from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.operators import RmsNorm
from tests.compiler.relax_kernels import compiled, execute, module

R = relax.op
RNG = np.random.default_rng
TARGETS = [
    ("cpu", "native"),
    ("cpu", "x86-64-v2"),
    ("vulkan", "lavapipe"),
    ("vulkan", "generic"),
    # a sample of them in each run: emulator_suite.py
    pytest.param(("rocm", "gfx1100"), marks=pytest.mark.full),
    pytest.param(("rocm", "gfx942"), marks=pytest.mark.full),
]


@pytest.fixture(params=TARGETS, ids="-".join)
def target(request):
    kind, arch = request.param
    if kind == "vulkan":
        gpu()
    if kind == "rocm":
        request.getfixturevalue("emulator")
    return kind, arch


def run(target, tmp_path, inputs, body, shape, dtype="float32"):
    """(result, kernels' names) of a function on a target."""
    made = compiled(module(inputs, body), inputs, *target, tmp_path)
    return execute(made, inputs, shape, dtype), made.names


def normal(*shape, seed=0, scale=1.0):
    return (RNG(seed).standard_normal(shape) * scale).astype(np.float32)


def chain(bb, *steps):
    """The last of `steps`, each a function of what the one before gave."""
    value = None
    for step in steps:
        value = bb.emit(step(value))
    return value


def float_const(x):
    return relax.const(x, "float32")


def softcap(bb, x):
    """tanh(x * 0.3) * 7: of two constants, so that no simplification joins them."""
    return chain(
        bb,
        lambda _: R.multiply(x, float_const(0.3)),
        R.tanh,
        lambda y: R.multiply(y, float_const(7.0)),
    )


def softcap_reference(x):
    return np.tanh(x.astype(np.float64) * 0.3) * 7


@pytest.mark.parametrize("shape", [(1, 1024), (5, 37), (3, 515)])
def test_a_chain_is_one_kernel(target, shape, tmp_path):
    x = normal(*shape, scale=5)
    got, names = run(target, tmp_path, {"x": x}, softcap, shape)
    assert names == [f"multiply_tanh_multiply_{shape[1]}_m{shape[0]}"]
    np.testing.assert_allclose(got, softcap_reference(x), rtol=2e-6, atol=7e-6)


@pytest.mark.parametrize("shape", [(1, 1024), (5, 37), (3, 515)])
def test_row_maximum(target, shape, tmp_path):
    x = normal(*shape, scale=5)
    got, names = run(target, tmp_path, {"x": x}, lambda bb, x: R.max(softcap(bb, x), axis=-1), shape[:1])
    assert len(names) <= 2
    np.testing.assert_allclose(got, softcap_reference(x).max(-1), rtol=2e-6, atol=7e-6)


ELEMENTWISE = {
    "silu": (R.nn.silu, lambda x: x / (1 + np.exp(-x))),
    "gelu": (R.nn.gelu, lambda x: x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))),
    "gelu_tanh": (
        R.nn.gelu_tanh,
        lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    ),
    "sigmoid": (R.sigmoid, lambda x: 1 / (1 + np.exp(-x))),
    "exp": (R.exp, np.exp),
    "tanh": (R.tanh, np.tanh),
    "erf": (R.erf, np.vectorize(math.erf)),
    "sin": (R.sin, np.sin),
    "cos": (R.cos, np.cos),
    "square": (lambda x: R.power(x, float_const(2.0)), np.square),
    "floor": (R.floor, np.floor),
    "abs": (R.abs, np.abs),
    "log": (lambda x: R.log(R.abs(x)), lambda x: np.log(abs(x))),
    "sqrt": (lambda x: R.sqrt(R.abs(x)), lambda x: np.sqrt(abs(x))),
    "rsqrt": (lambda x: R.rsqrt(R.abs(x)), lambda x: 1 / np.sqrt(abs(x))),
    "power": (lambda x: R.power(R.abs(x), float_const(0.7)), lambda x: abs(x) ** 0.7),
    "clip": (lambda x: R.clip(x, -1, 2), lambda x: x.clip(-1, 2)),
}


def test_functions_of_one_number(target, tmp_path):
    """All of them in one function, on numbers large and small; their results side by side."""
    x = np.concatenate([normal(1, 60), normal(1, 60, seed=1, scale=10), normal(1, 11, seed=2, scale=1e-3)], axis=1)

    def body(bb, x):
        return bb.emit(R.concat([bb.normalize(op(x)) for op, _ in ELEMENTWISE.values()], axis=0))

    got, _ = run(target, tmp_path, {"x": x}, body, (len(ELEMENTWISE), x.shape[1]))
    exact = x.astype(np.float64)
    for row, (name, (_, reference)) in zip(got, ELEMENTWISE.items(), strict=True):
        np.testing.assert_allclose(row, reference(exact)[0], rtol=1e-6, atol=1e-6, err_msg=name)


def test_functions_of_cpus_are_no_calls(tmp_path):
    """They take a number at a time."""
    x = normal(4, 64)
    ops = [R.nn.silu, R.tanh, R.erf, lambda x: R.power(x, float_const(0.7))]
    made = compiled(module({"x": x}, lambda bb, x: chain(bb, lambda _: x, *ops)), {"x": x}, "cpu", "native", tmp_path)
    library = (made.folder / "kernels.so").read_bytes()
    assert b"memcpy" in library or b"pthread" in library  # names of what it calls
    assert not [name for name in (b"expf", b"tanhf", b"erff", b"powf") if name in library]


def test_limits(target, tmp_path):
    """What has no finite result, or none that float32 can hold."""
    x = np.array([[0, -0.0, 100, -100, 88.5, -90, np.inf, -np.inf, np.nan, 3e38, 1e-40]], np.float32)

    def body(bb, x):
        return bb.emit(R.concat([R.exp(x), R.tanh(x), R.sigmoid(x), R.log(x)], axis=0))

    got, _ = run(target, tmp_path, {"x": x}, body, (4, x.shape[1]))
    with np.errstate(all="ignore"):
        exact = x.astype(np.float64)[0]
        wanted = [np.exp(exact), np.tanh(exact), 1 / (1 + np.exp(-exact)), np.log(exact)]
    columns = slice(0, 10)  # GPUs may take numbers below 2**-126 for zero
    for row, reference in zip(got, wanted, strict=True):
        with np.errstate(all="ignore"):
            np.testing.assert_allclose(row[columns], reference.astype(np.float32)[columns], rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("shape", [(1, 1024), (7, 129), (2, 31)])
def test_softmax(target, shape, tmp_path):
    x = normal(*shape, scale=3)
    got, names = run(target, tmp_path, {"x": x}, lambda bb, x: R.nn.softmax(x, axis=-1), shape)
    assert names == [f"softmax_{shape[1]}_m{shape[0]}"]
    powers = np.exp(x.astype(np.float64) - x.max(-1, keepdims=True))
    np.testing.assert_allclose(got, powers / powers.sum(-1, keepdims=True), rtol=2e-6, atol=1e-9)


@pytest.mark.parametrize("shape", [(1, 640), (5, 33)])
def test_mean_and_variance(target, shape, tmp_path):
    """A layer norm in its parts."""
    x, g = normal(*shape, seed=1), normal(shape[1], seed=2)

    def body(bb, x, g):
        mean, variance = (bb.emit(op(x, axis=[-1], keepdims=True)) for op in (R.mean, R.variance))
        scale = bb.emit(R.rsqrt(bb.emit(R.add(variance, float_const(1e-5)))))
        return R.multiply(bb.emit(R.multiply(bb.emit(R.subtract(x, mean)), scale)), g)

    got, _ = run(target, tmp_path, {"x": x, "g": g}, body, shape)
    exact = x.astype(np.float64)
    wanted = (exact - exact.mean(-1, keepdims=True)) / np.sqrt(exact.var(-1, keepdims=True) + 1e-5) * g
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


def test_split_slice_concat_and_gate(target, tmp_path):
    x = normal(3, 2 * 37)

    def body(bb, x):
        halves = bb.emit(R.split(x, 2, axis=-1))
        a, b = (bb.emit(relax.TupleGetItem(halves, i)) for i in range(2))
        gated = bb.emit(R.multiply(bb.emit(R.sigmoid(a)), b))
        part = bb.emit(R.strided_slice(gated, axes=[1], begin=[3], end=[20]))
        return R.concat([part, b], axis=1)

    got, _ = run(target, tmp_path, {"x": x}, body, (3, 17 + 37))
    a, b = np.split(x.astype(np.float64), 2, axis=1)
    np.testing.assert_allclose(got, np.concatenate([(b / (1 + np.exp(-a)))[:, 3:20], b], axis=1), rtol=2e-6)


def test_halves_and_integers(target, tmp_path):
    """Casts, transposition, broadcast, and rows picked by number."""
    x, rows = normal(6, 40).astype(np.float16), np.array([5, 0, 3], np.int32)

    def body(bb, x, rows):
        picked = bb.emit(R.take(x, rows, axis=0))
        turned = bb.emit(R.permute_dims(bb.emit(R.astype(picked, "float32")), [1, 0]))
        return R.astype(bb.emit(R.multiply(turned, bb.emit(R.astype(rows, "float32")))), "float16")

    got, _ = run(target, tmp_path, {"x": x, "rows": rows}, body, (40, 3), "float16")
    assert np.array_equal(got, (x[rows].astype(np.float32).T * rows.astype(np.float32)).astype(np.float16))


OTHERS = {  # name: (operators, shape and dtype of the result, the same by numpy)
    "argmax": (
        lambda bb, x: R.astype(bb.emit(R.argmax(x, axis=-1)), "int32"),
        ((5,), "int32"),
        lambda x: x.argmax(-1),
    ),
    "reshape": (
        lambda bb, x: R.tanh(bb.emit(R.reshape(x, (5, 3, 100)))),
        ((5, 3, 100), "float32"),
        lambda x: np.tanh(x).reshape(5, 3, 100),
    ),
    "where": (
        lambda bb, x: R.where(bb.emit(R.greater(x, float_const(0.0))), x, bb.emit(R.multiply(x, float_const(0.5)))),
        ((5, 300), "float32"),
        lambda x: np.where(x > 0, x, x * 0.5),
    ),
    "matmul": (
        lambda bb, x: R.matmul(x, bb.emit(R.permute_dims(x))),
        ((5, 5), "float32"),
        lambda x: x @ x.T,
    ),
    "columns": (
        lambda bb, x: R.max(x, axis=[0]),
        ((300,), "float32"),
        lambda x: x.max(0),
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_operators(target, name, tmp_path):
    body, (shape, dtype), reference = OTHERS[name]
    x = normal(5, 300)
    got, _ = run(target, tmp_path, {"x": x}, body, shape, dtype)
    np.testing.assert_allclose(got, reference(x.astype(np.float64)), rtol=1e-5, atol=1e-4)


def test_many_elements(target, tmp_path):
    """More than a CPU leaves to one thread; with a small workgroup, more than a grid has threads."""
    rows = 9000 if target == ("vulkan", "generic") else 40
    x, y = normal(rows, 129), normal(1, 129, seed=1)
    got, _ = run(target, tmp_path, {"x": x, "y": y}, lambda bb, x, y: R.add(x, y), x.shape)
    assert np.array_equal(got, x + y)


@pytest.mark.parametrize("shape", [(3, 8, 300), (1, 1, 70000)])
def test_large_reductions(target, shape, tmp_path):
    x = normal(*shape)
    got, _ = run(target, tmp_path, {"x": x}, lambda bb, x: R.sum(x, axis=[1, 2]), shape[:1])
    np.testing.assert_allclose(got, x.astype(np.float64).sum((1, 2)), rtol=1e-4, atol=1e-3)


def test_a_matrix_for_each_part_of_the_columns(target, tmp_path):
    """The results of a row are a workgroup's."""
    m, parts, n, k = 3, 4, 64, 48
    x, w = normal(m, parts * k), normal(parts * n, k, seed=1)

    def product(x, w):
        def element(i, j):
            column = te.reduce_axis((0, k), "k")
            return te.sum(x[i, j // n * k + column] * w[j, column], axis=column)

        return te.compute((m, parts * n), element, "product")

    got, _ = run(target, tmp_path, {"x": x, "w": w}, lambda bb, x, w: bb.call_te(product, x, w), (m, parts * n))
    wanted = np.einsum("mpk,pnk->mpn", x.reshape(m, parts, k), w.reshape(parts, n, k)).reshape(m, -1)
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)


def mixed(bb, state, x, g):
    """An operator of ours between others: its kernel stays as it is, and what surrounds it is not fused across."""
    before = bb.emit(R.tanh(bb.emit(R.multiply(x, float_const(0.5)))))
    normed = bb.emit(
        ops.call(
            RmsNorm(k=shape_of(before)[1], m=shape_of(before)[0], eps=1e-5, rows="all", layout=""), [state, before, g]
        )
    )
    return R.sigmoid(bb.emit(R.add(normed, before)))


def test_between_kernels_of_ours(target, tmp_path):
    m, k = 3, 64
    inputs = {"state": np.array([0, m, 0, 0], np.int32), "x": normal(m, k), "g": normal(k, seed=1)}
    got, names = run(target, tmp_path, inputs, mixed, (m, k))
    assert names == ["multiply_tanh_64_m3", "rms_norm_64_m3", "add_sigmoid_64_m3"]
    before = np.tanh(inputs["x"].astype(np.float64) * 0.5)
    normed = before / np.sqrt((before**2).mean(-1, keepdims=True) + 1e-5) * inputs["g"]
    np.testing.assert_allclose(got, 1 / (1 + np.exp(-(normed + before))), rtol=2e-5)


def test_each_arch_of_an_artifact_has_its_own(tmp_path):
    """A profile with small workgroups and one with large ones."""
    inputs = {"x": normal(4, 300)}
    made = compiled(module(inputs, softcap), inputs, "vulkan", "generic,vangogh", tmp_path)
    (name,) = set(made.names)
    launches = {arch: made.code["launches"][arch][name]["steps"] for arch in ("generic", "vangogh")}
    assert [len(steps) for steps in launches.values()] == [1, 1]
    assert [steps[0]["block"][0] for steps in launches.values()] == [32, 256]
    facts = made.backend.facts(name)
    roles = [param["role"] for param in facts["params"]]
    assert (facts["operator"], roles, facts["bytes"]["call"]) == ("generic", ["input", "output"], 0)


def test_what_has_no_kernel_is_refused(tmp_path):
    inputs = {"x": normal(4, 300)}
    for op, name in ((R.sort, "sort"), (R.cumsum, "cumsum")):
        with pytest.raises(UserError, match=rf"relax\.{name}, for which there is no kernel"):
            compiled(module(inputs, lambda bb, x, op=op: op(x, axis=-1)), inputs, "vulkan", "lavapipe", tmp_path)
    with pytest.raises(ValueError, match="make it a weight"):
        body = lambda bb, x: R.add(x, relax.const(inputs["x"]))  # noqa: E731
        compiled(module(inputs, body), inputs, "cpu", "native", tmp_path)
