"""Prefill attention on cooperative matrices (`attention_prefill_coop.py`), against numpy in float64.

On a device with cooperative matrices, of whatever shape and subgroup size it has, otherwise skipped. For other devices
the kernels are compiled and looked at. Every case is a chunk in the middle of a sequence; the caches hold stale finite
numbers behind it, and the queries of tokens that are not live are not numbers: neither may matter.
"""

import functools
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
from test_cpu_attention import LOG2E, attention_reference
from test_gpu_attention import CTX, LEFT, check_output, outputs, pack, stale_caches
from vulkan_harness import gpu, run

from mlc_amd.compiler.codegen.spirv import compile_spirv
from mlc_amd.compiler.codegen.spirv_reader import read
from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.gpu.attention import attention
from mlc_amd.schedules.gpu.attention_prefill_coop import Tile, attention_prefill_coop, lds_bytes, tile_of
from mlc_amd.schedules.gpu.pairs import from_pairs
from mlc_amd.schedules.gpu.profiles import resolve


class Case(NamedTuple):
    heads: int
    kv_heads: int
    d: int
    m: int
    act: str
    states: tuple  # (position, live tokens)
    tile: Tile | None = None


CASES = {
    "group_4": Case(4, 1, 64, 16, "", ((0, 16), (57, 13), (CTX - 16, 16))),
    "group_7": Case(7, 1, 96, 16, "pairs", ((33, 16), (300, 3))),
    "two_kv_heads": Case(4, 2, 32, 32, "half", ((0, 32), (64, 1))),
    # waves of a workgroup see different numbers of keys
    "short_blocks": Case(2, 2, 128, 64, "half", ((0, 64), (57, 50)), Tile(4, 1, 16)),
    "fragments": Case(3, 1, 32, 64, "", ((57, 64), (300, 40)), Tile(4, 2, 32)),
    "parts": Case(3, 1, 32, 64, "pairs", ((0, 64), (57, 64), (300, 40)), Tile(4, 1, 64, 2)),
    "fragments_and_parts": Case(2, 1, 64, 32, "", ((0, 32), (100, 31)), Tile(4, 2, 64, 4)),
}
SHAPES = ((32, 8, 128), (32, 8, 64), (14, 2, 64), (32, 32, 96), (8, 4, 256))


@functools.cache
def device():
    """The profile of the test device; skips the test unless it has cooperative matrices."""
    found = gpu()
    if not found.float16_matrices:
        pytest.skip(f"{found.name} has no cooperative matrices")
    return replace(resolve("lavapipe"), matrix="coop", fragment=found.float16_matrices[0], wave=found.subgroup[1])


def run_case(case, profile, queries, k, v, state):
    """The output array after the kernel ran on queries [m, heads, d], and keys and values [kv_heads, CTX, d]."""
    heads, kv_heads, d, m, act, _, tile = case
    kernel = attention_prefill_coop(heads, kv_heads, d, CTX, m, act, profile, "k", tile)
    out = outputs(m, heads * d)["H" if act else "X"]
    caches = pack(k, v)
    results = run(kernel, [np.array([*state, 0, 0], np.int32), queries, *caches, out], profile)
    for before, after in zip(caches, results[2:4], strict=True):
        assert (before == after).all()
    return from_pairs(results[-1]) if act == "pairs" else results[-1]


def compare(case, profile, grow=0.0):
    """One run for each state. grow: how much larger the last key of the cache is than the first."""
    rng = np.random.default_rng(1)
    for position, live in case.states:
        end = position + live
        k, v = stale_caches(rng, case.kv_heads, case.d, end)
        k[:, :end] *= (1 + grow * np.arange(end) / CTX)[:, None].astype(np.float16)
        q = rng.standard_normal((case.m, case.heads, case.d)) * 2 * LOG2E / np.sqrt(case.d)
        q[live:] = np.nan
        q = q.astype(np.float16)
        got = run_case(case, profile, q, k, v, (position, live))
        keys, values = (x[:, :end].astype(np.float64) for x in (k, v))
        expected = attention_reference(q[:live].astype(np.float64) / LOG2E * np.sqrt(case.d), keys, values, position)
        check_output({"H": got, "X": got}, "half" if case.act else "", live, expected)


@pytest.mark.parametrize("name", CASES)
def test_attention(name):
    compare(CASES[name], device())


@pytest.mark.parametrize("name", ["group_4", "fragments_and_parts"])
def test_scores_that_grow(name):
    """The reference of the weights is renewed again and again."""
    compare(CASES[name], device(), grow=60)


def test_nothing_is_stored_without_live_tokens():
    case = CASES["group_4"]
    k, v = stale_caches(np.random.default_rng(1), case.kv_heads, case.d, 8)
    got = run_case(case, device(), np.zeros((case.m, case.heads, case.d), np.float16), k, v, (8, 0))
    assert (got == LEFT).all()


@pytest.mark.parametrize("arch", ["nvidia", "rdna3", "rdna4"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def test_default_tiles_fit(shape, arch):
    profile = resolve(arch)
    kernels = {f"k{m}": attention(*shape, 4096, m, "pairs", profile, f"k{m}") for m in (16, 64, 512)}
    for name, kernel in compile_spirv(kernels, profile).modules.items():
        facts, tile = read(kernel.binary), tile_of(int(name[1:].partition("_")[0]), *shape, profile)
        assert facts.matrix and "CooperativeMatrixKHR" in kernel.capabilities
        assert facts.lds == kernel.lds == lds_bytes(tile, shape[2], profile.fragment) <= profile.lds
        assert np.prod(kernel.block) <= profile.threads
        assert len(kernel.binary) < 200_000


def test_tiles_suit_heads_and_waves():
    nvidia = resolve("nvidia")
    assert tile_of(512, 32, 8, 64, nvidia) != tile_of(512, 32, 8, 128, nvidia)
    assert tile_of(512, 32, 8, 64, replace(nvidia, wave=64)).waves == 4


def test_short_chunks_share_out_their_keys():
    nvidia, heads = resolve("nvidia"), (32, 8, 128)
    tiles = {m: tile_of(m, *heads, nvidia) for m in (16, 64, 512)}
    assert tiles[16].parts == tiles[64].parts == 4 and tiles[512].parts == 1
    assert tile_of(64, *heads, replace(nvidia, units=16)) == tiles[512]  # a small GPU is busy anyway


@pytest.mark.parametrize(
    "m, d, act, message",
    [
        (24, 64, "", "multiples of 16 tokens"),
        (16, 64, "rows", "int8"),
        (16, 2048, "", "shared memory"),
        (16, 80, "", "multiples of 32"),
    ],
)
def test_what_does_not_fit_is_refused(m, d, act, message):
    with pytest.raises(UserError, match=message):
        attention_prefill_coop(4, 2, d, 128, m, act, resolve("nvidia"), "k")
