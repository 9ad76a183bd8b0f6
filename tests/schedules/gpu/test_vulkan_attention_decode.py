"""Decode attention as it is split up for large GPUs (`attention_decode.py`), on any Vulkan device, against numpy in
float64.

The plan of such a GPU on a small one: short steps, splits that meet in device memory, and one split alone where there
are few keys, a block or two for each of its waves.
"""

import functools
from dataclasses import replace

import pytest
from attention_cases import CTX, Case, Rows, check_attention
from samples import sample
from vulkan_harness import execute, gpu

from mlc_amd.schedules.gpu.attention.attention import attention
from mlc_amd.schedules.gpu.attention.attention_splits import splits_of
from mlc_amd.schedules.gpu.attention.attention_step import MAX_PARTS
from mlc_amd.schedules.gpu.base.profiles import resolve
from mlc_amd.schedules.operators.attention import Attention, Rope

STATES = tuple((position, 1) for position in (0, 128, 256, 257, CTX - 1))
CASES = {
    "queries": Case(8, 2, 128, states=STATES),
    # one row sees more keys than all others, or all see many
    "rows": Case(
        8, 2, 64, m=8, layout="rows", several=8, states=(Rows((0, CTX - 1, 3, 64)), Rows((CTX - 1, 500, 450) * 2)),
    ),
    "rows of a window": Case(
        2, 1, 64, m=16, several=16, states=(Rows((CTX - 1, 0, 300, 299)),), attributes={"window": 300}
    ),
    # four workgroups have two of the query heads each; one of them writes the cache
    "parts": Case(8, 1, 64, layout="rows", rope=Rope(True, 64, 1e-6), states=STATES, attributes={"sinks": True}),
    "normalized": Case(2, 1, 96, layout="pairs", rope=Rope(True, 96, 1e-6), states=STATES),
    # windows that several splits share, of which the first begins within a block
    "window": Case(
        4, 1, 64, rope=Rope(True, 64), states=STATES,
        attributes={"window": 300, "softcap": 4.0, "sinks": True, "scale": 0.2},
    ),
    "window of a block": Case(4, 1, 64, rope=Rope(True, 64), states=STATES, attributes={"window": 300}),
    "chunk": Case(2, 1, 64, states=STATES, attributes={"chunk": 300}),
    # of several sequences, and of one: the first of its rows is after the window of the last
    "rotated rows": Case(
        8, 2, 64, m=8, layout="rows", several=8, rope=Rope(True, 64, 1e-6),
        states=(Rows((0, CTX - 1, 3, 64)), Rows((), (0, 8)), Rows((70, CTX - 1), (253, 5))),
    ),
    "rotated rows of codes": Case(
        2, 1, 64, m=8, several=8, rope=Rope(True, 64), states=(Rows((130,), (63, 4)),), attributes={"kv": "q8_0"}
    ),
}  # fmt: skip


@functools.cache
def profile():
    """An NVIDIA GPU's plan for workgroups of four waves, of the test device's size."""
    found = gpu()
    wave = found.subgroup[1]
    return replace(resolve("lavapipe"), family="nvidia", units=132, wave=wave, threads=4 * wave, join_us=1.0)


@pytest.mark.parametrize("name", sample(CASES, ["parts", "window", "rotated rows"]))
def test_splits(name):
    case = CASES[name]
    kernel = attention(case.op, profile(), "attention")
    assert splits_of(case.layer, profile(), m=case.m).count > 1
    check_attention(case, lambda arrays: execute(kernel, arrays, profile()))


def test_rows_of_a_sequence_behind_a_window():
    """Rows that are no longer in the window of rows after them, in the same step."""
    case = Case(
        4, 1, 96, m=16, several=16, rope=Rope(False, 64), states=(Rows((5, 70), (125, 12)), Rows((), (0, 16))),
        attributes={"window": 8, "softcap": 4.0, "sinks": True},
    )  # fmt: skip
    kernel = attention(case.op, profile(), "attention")
    check_attention(case, lambda arrays: execute(kernel, arrays, profile()))


@pytest.mark.parametrize("m", [2, 8, 16, 64])
def test_rows_share_the_gpu(m):
    """A row that is alone has as many splits as a step of one row, as far as there is memory for them."""
    arch, layer = resolve("nvidia"), Attention(32, 8, 128, 16384)
    found, one = splits_of(layer, arch, m=m), splits_of(layer, arch)
    assert found.count == min(one.count, found.maximum) and m * found.maximum <= MAX_PARTS


def test_a_window_needs_fewer_splits():
    """What decode costs does not grow with the context: the grid is that of the window."""
    shape = (8, 2, 64)
    window, short = Attention(*shape, 16384, window=64), Attention(*shape, 128)
    assert splits_of(window, profile()).count == splits_of(short, profile()).count


@pytest.mark.parametrize(
    ("heads", "kv_heads", "d", "span", "groups", "splits"),
    [
        (32, 8, 128, 0, 8, 32),  # Llama 3 8B
        (32, 4, 128, 0, 4, 32),  # Qwen3 30B A3B: half the KV heads
        (64, 8, 64, 0, 8, 32),  # gpt-oss 20B
        (64, 8, 64, 128, 64, 2),  # its windows
    ],
)
def test_workgroups_fill_the_gpu(heads, kv_heads, d, span, groups, splits):
    """Whatever the number of KV heads: there are about as many workgroups as compute units at full context, or more. A
    window has some from its heads alone: one split processes all of its keys, without meeting others."""
    arch = resolve("nvidia")
    found = splits_of(Attention(heads, kv_heads, d, 16384, window=span), arch)
    assert (kv_heads * found.parts, found.count) == (groups, splits)
    if span:
        assert found.waves * found.alone * found.step >= span + found.step
    else:
        assert groups * splits > 0.9 * arch.units
