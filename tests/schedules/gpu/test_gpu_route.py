"""The router of a mixture of experts on the GPU, alone and with the norm and the logits, against numpy: on Mesa's CPU
driver and in the ISA emulator."""

import numpy as np
import pytest
from vulkan_harness import PROFILES, on_both

from mlc_amd.schedules.gpu.base.arch import resolve
from mlc_amd.schedules.gpu.experts.route import scratch_shapes
from mlc_amd.schedules.operators.experts import Experts
from mlc_amd.tools.reference import experts as reference
from tests.schedules.gpu.test_gpu_experts import LEFT, build, emulated, execute, left, of, profile, stack, state

__all__ = ["profile"]  # a fixture
EXPERTS = Experts(40, 6, 32)
OPTIONS = {"normalize": False, "scale": 1.0, "bias": False, "factors": False, "groups": 1, "groups_used": 1}
ROUTINGS = {
    "softmax": {"gating": "softmax", "normalize": True},
    "sigmoid": {"gating": "sigmoid", "normalize": True, "scale": 2.5, "bias": True, "groups": 4, "groups_used": 2},
    "softmax_used": {"gating": "softmax_used", "factors": True},
    "sqrt_softplus": {"gating": "sqrt_softplus", "normalize": True, "bias": True},
    "plain": {"gating": "sigmoid"},
}


@pytest.mark.parametrize(("profile_name", "name"), on_both(ROUTINGS, ("sigmoid",)))
def test_route(profile, name):
    for m, live in ((1, 1), (4, 3)):
        check_route(name, m, live, profile, execute)


def check_route(name, m, live, arch, run_kernel):
    """run_kernel(kernel, arrays, arch)"""
    experts, rng, options = EXPERTS, np.random.default_rng(m), OPTIONS | ROUTINGS[name]
    logits = (2 * rng.standard_normal((m, 48))).astype(np.float32)
    logits[:, 7] = logits[:, 3] = logits.max()  # of equal ones the lower is first
    B, F = (rng.uniform(0.1, 1, 48).astype(np.float32) for _ in "BF")
    B[7] = B[3]
    kernel = build("route", arch, n=48, m=m, **of(experts), **options)
    arrays = state(live) | {"L": logits, "B": B, "F": F}
    arrays |= {"Ids": left((m, 6), np.int32), "Weights": left((m, 6), np.float32)}
    run_kernel(kernel, arrays, arch)
    options |= {"bias": B[:40] if options["bias"] else None, "factors": F[:40] if options["factors"] else None}
    ids, weights = reference.route(logits[:live, :40], 6, **options)
    np.testing.assert_array_equal(arrays["Ids"][:live], ids)
    np.testing.assert_allclose(arrays["Weights"][:live], weights, rtol=3e-6)
    assert (arrays["Ids"][live:] == LEFT).all() and (arrays["Weights"][live:] == LEFT).all()


# format of the router, hidden size, layout of the norm's result, whether float32 as well, bias
NORM_ROUTES = {
    "softmax": ("f32", 96, "rows", True, False),
    "sigmoid": ("f16", 1056, "", False, True),
    "softmax_used": ("bf16", 2592, "rows", True, True),
    "plain": ("f32", 64, "rows", False, False),
}


def norm_route_case(name, arch, experts=EXPERTS):
    """(kernel, arrays, check of what it wrote)"""
    fmt, k, layout, both, biased = NORM_ROUTES[name]
    options = OPTIONS | ROUTINGS[name]
    rng, count, used = np.random.default_rng(k), experts.count, experts.used
    x, g, WB, B, F = (rng.standard_normal(n).astype(np.float32) for n in (k, k, count, 48, 48))
    planes, w = stack(fmt, 1, count, k, 5)
    g *= np.float32(2 / np.linalg.norm(w[0], axis=1).mean())  # logits of a router's size
    kernel = build(
        "norm_route", arch, fmt=fmt, k=k, eps=1e-5, layout=layout, both=both, router_bias=biased, **of(experts),
        **options,
    )  # fmt: skip
    out = {"A": left((1, k // 32, 32), np.int8), "S": left((1, k // 32, 4), np.float32)} if layout else {}
    out |= {"Y": left((1, k), np.float32)} if both or not layout else {}
    out |= {"Ids": left((1, used), np.int32), "Weights": left((1, used), np.float32)}
    shapes = scratch_shapes(count)
    scratch = {"Logits": np.full(shapes["Logits"][0], np.nan, np.float32), "Arrived": np.zeros(1, np.int32)}
    arrays = state(1) | {"X": x[None], "G": g, "WB": WB, "B": B, "F": F} | scratch | out
    arrays |= {f"W_{p}": a for p, a in planes.items()}

    def check():
        y = x / np.sqrt((x.astype(np.float64) ** 2).mean() + 1e-5) * g
        logits = y @ w[0].T.astype(np.float64) + (WB if biased else 0)
        more = {"bias": B[:count] if options["bias"] else None, "factors": F[:count] if options["factors"] else None}
        ids, weights = reference.route(logits[None], used, **options | more)
        np.testing.assert_array_equal(arrays["Ids"], ids)
        np.testing.assert_allclose(arrays["Weights"], weights, rtol=2e-5)
        assert not arrays["Arrived"].any()
        if "Y" in out:
            np.testing.assert_allclose(out["Y"][0], y, rtol=3e-6)
        if layout:
            assert (np.abs(out["A"] * out["S"][..., :1] - y.reshape(1, -1, 32)) <= 0.501 * out["S"][..., :1]).all()

    return kernel, arrays, check


@pytest.mark.parametrize(("profile_name", "name"), on_both(NORM_ROUTES, ("sigmoid",)))
def test_norm_route(profile, name):
    kernel, arrays, check = norm_route_case(name, profile)
    execute(kernel, arrays, profile)
    check()


@pytest.mark.parametrize("profile_name", PROFILES)
@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_scores_without_an_order_still_name_experts(profile, bad):
    """Whatever the logits are, `used` different experts are named: their weights are read."""
    logits, experts = np.full((1, 48), bad, np.float32), EXPERTS
    logits[0, [5, 30]] = 1, 2
    arrays = state(1) | {"L": logits, "Ids": left((1, 6), np.int32), "Weights": left((1, 6), np.float32)}
    options = OPTIONS | {"gating": "softmax_used"}
    execute(build("route", profile, n=48, m=1, **of(experts), **options), arrays, profile)
    ids = arrays["Ids"][0]
    assert len(set(ids)) == 6 and ids.min() >= 0 and ids.max() < experts.count
    assert {5, 30} <= set(ids) or np.isnan(bad)


@pytest.mark.full
@pytest.mark.emulator
@pytest.mark.parametrize("arch", ["gfx1100", "gfx1201", "gfx942"])
def test_amd_code(arch):
    for name in ROUTINGS:
        check_route(name, 4, 3, resolve(arch), emulated)
        kernel, arrays, check = norm_route_case(name, resolve(arch))
        emulated(kernel, arrays, resolve(arch))
        check()
