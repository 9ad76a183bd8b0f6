"""Prefill attention on cooperative matrices (`attention_prefill_coop.py`), against numpy in float64.

In the SPIR-V emulator, as NVIDIA's and AMD's GPUs get them; at a model's size kernels are compiled and looked at. Every
case is a chunk in the middle of a sequence; the caches hold stale finite
numbers after it, and the queries of tokens that are not live are not numbers: neither may matter.
"""

from dataclasses import replace

import numpy as np
import pytest
from attention_cases import CTX, LEFT, Case, Rows, check_attention
from samples import sample
from spirv_emulation import execute

from mlc_amd.compiler.codegen.spirv import compile_spirv
from mlc_amd.compiler.codegen.spirv_reader import read
from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.gpu.attention.attention import attention
from mlc_amd.schedules.gpu.attention.attention_coop_tiles import Tile, tile_of
from mlc_amd.schedules.gpu.attention.cache import cache_types
from mlc_amd.schedules.gpu.base.profiles import resolve
from mlc_amd.schedules.operators.attention import SLOTS, Attention, CausalAttention

NVIDIA = resolve("nvidia")
CASES = {
    "group_4": Case(4, 1, 64, 16, "", states=((0, 16), (57, 13), (CTX - 16, 16))),
    "group_7": Case(7, 1, 96, 16, "pairs", states=((33, 16), (300, 3))),
    "head_24": Case(3, 1, 24, 16, "", states=((33, 16), (300, 3))),
    "head_80": Case(2, 1, 80, 16, "pairs", states=((57, 13),)),
    "two_kv_heads": Case(4, 2, 32, 32, "pairs", states=((0, 32), (64, 1))),
    # waves of a workgroup see different numbers of keys
    "short_blocks": Case(2, 2, 128, 64, "pairs", states=((0, 64), (57, 50))),
    "fragments": Case(3, 1, 32, 64, "", states=((57, 64), (300, 40))),
    "parts": Case(3, 1, 32, 64, "pairs", states=((0, 64), (57, 64), (300, 40))),
    "fragments_and_parts": Case(2, 1, 64, 32, "", states=((0, 32), (100, 31))),
    # smaller than a chunk; larger than a block of keys
    "window": Case(2, 1, 32, 64, "", states=((0, 64), (70, 64), (400, 45)), attributes={"window": 9, "sinks": True}),
    "window_of_a_page": Case(
        3, 1, 32, 16, "", states=((0, 16), (56, 16), (401, 13)), attributes={"window": 49, "sinks": True}
    ),
    "window_of_blocks": Case(2, 1, 64, 64, "", states=((290, 64), (440, 50)), attributes={"window": 200}),
    "image": Case(
        2, 1, 64, 64, "", states=(Rows((), (57, 50), 41), Rows((), (0, 64), 64), Rows((), (300, 64))),
        attributes={"images": True},
    ),
    "image_window": Case(
        3, 1, 32, 64, "", several=8, states=(Rows((130,), (57, 45), 33), Rows((), (5, 64), 64)),
        attributes={"images": True, "window": 20},
    ),
    "chunk": Case(2, 1, 32, 64, "", states=((30, 64), (393, 64)), attributes={"chunk": 100}),
    "mixed": Case(4, 2, 64, 64, "pairs", several=8, states=(Rows((130, 5, 299), (57, 45)), Rows((3,) * 7, (0, 57)))),
    "mixed_window": Case(
        2, 1, 32, 64, several=63, states=(Rows((0,) * 63, (70, 1)), Rows((300,), (401, 63))), attributes={"window": 49}
    ),
    "mixed_chunk": Case(3, 1, 32, 64, several=8, states=(Rows((300,), (93, 63)),), attributes={"chunk": 100}),
    "q8": Case(4, 2, 64, 64, "pairs", several=8, states=(Rows((130,), (57, 45)),), attributes={"kv": "q8_0"}),
    "q4": Case(4, 2, 64, 64, "pairs", several=8, states=(Rows((130,), (57, 45)),), attributes={"kv": "q4_0"}),
    "attributes": Case(
        3, 1, 32, 64, "pairs", states=((60, 64), (400, 64)),
        attributes={"window": 100, "softcap": 4.0, "sinks": True, "scale": 0.2},
    ),
}  # fmt: skip
TILES = {
    "short_blocks": Tile(4, 1, 16),
    "fragments": Tile(4, 2, 32),
    "parts": Tile(4, 1, 64, 2),
    "fragments_and_parts": Tile(4, 2, 64, 4),
    "attributes": Tile(4, 2, 64, 2),
}
SHAPES = ((32, 8, 128), (32, 8, 64), (14, 2, 64), (32, 32, 96), (8, 4, 256))


def runner(name, profile=NVIDIA):
    """Runs the case's kernel on arrays by name."""
    case = CASES[name]
    kernel = attention(case.op, profile, "k", TILES.get(name))
    return lambda arrays: execute(kernel, arrays, profile)


def compare(name, profile=NVIDIA, **how):
    check_attention(CASES[name], runner(name, profile), **how)


ON = [(name, arch) for name in CASES for arch in ("nvidia", "rdna3", "rdna4")]
QUICK = ("group_4", "head_24", "fragments_and_parts", "window_of_a_page")


@pytest.mark.parametrize(
    ("name", "arch"),
    sample(ON, [*((name, "nvidia") for name in QUICK), ("head_80", "rdna3"), ("q8", "rdna4"), ("q4", "rdna3")]),
)
def test_attention(name, arch):
    compare(name, resolve(arch))


@pytest.mark.full
@pytest.mark.parametrize("name", ["group_4", "fragments_and_parts"])
def test_scores_that_grow(name):
    """The reference of the weights is renewed again and again."""
    compare(name, grow=60)


@pytest.mark.parametrize(
    ("name", "room"), sample([("short_blocks", 50), ("fragments", 50), ("mixed", 1 << 10)], [("fragments", 50)])
)
def test_queries_that_registers_do_not_hold(name, room):
    """As of wide heads on AMD's GPUs, most or all of their fragments are loaded for each block."""
    case, profile = CASES[name], replace(NVIDIA, query_registers=room)
    tile = TILES.get(name) or tile_of(case.layer, case.m, profile)
    assert tile.held_steps(case.layer.width, profile) < case.layer.width // profile.fragment[2]
    compare(name, profile)


def test_wide_heads_leave_room_for_their_outputs():
    held = {
        arch: [
            tile_of(Attention(24, 4, d, 4096), 512, resolve(arch)).held_steps(d, resolve(arch)) for d in (64, 128, 256)
        ]
        for arch in ("nvidia", "rdna3", "rdna4")
    }
    assert held == {"nvidia": [4, 8, 16], "rdna3": [4, 8, 3], "rdna4": [4, 8, 3]}


def test_nothing_is_stored_without_live_tokens():
    case = CASES["group_4"]
    queries = np.zeros((case.m, case.heads, case.d), np.float16)
    k, v = (np.zeros(shape, np.float16) for shape, _ in cache_types(case.layer).values())
    out = np.full((case.m, case.heads * case.d), LEFT, np.float32)
    places = {"rows": np.zeros((case.m, 2), np.int32), "pages": np.zeros((SLOTS, case.layer.blocks), np.int32)}
    runner("group_4")({"state": np.zeros(4, np.int32), "Qo": queries, "Kc": k, "Vc": v, "X": out, **places})
    assert (out == LEFT).all()


TILED = [(shape, arch) for shape in SHAPES for arch in ("nvidia", "rdna3", "rdna4")]


@pytest.mark.parametrize(
    ("shape", "arch"),
    sample(TILED, [case for case in TILED if case[0] == SHAPES[0] or case == (SHAPES[3], "nvidia")]),
    ids=lambda part: part if isinstance(part, str) else "x".join(map(str, part)),
)
def test_default_tiles_fit(shape, arch):
    profile, layer = resolve(arch), Attention(*shape, 4096)
    ops = {f"k{m}": CausalAttention(layer=layer, m=m, single=0, layout="pairs") for m in (16, 64, 512)}
    kernels = {name: attention(op, profile, name) for name, op in ops.items()}
    for name, kernel in compile_spirv(kernels, profile).modules.items():
        facts, tile = read(kernel.binary), tile_of(layer, int(name[1:].partition("_")[0]), profile)
        assert facts.matrix and "CooperativeMatrixKHR" in kernel.capabilities
        assert facts.lds == kernel.lds == tile.lds_bytes(shape[2], profile.fragment) <= profile.lds
        assert np.prod(kernel.block) <= profile.threads
        assert len(kernel.binary) < 200_000


def test_tiles_suit_heads_and_waves():
    nvidia = resolve("nvidia")
    narrow, wide = (Attention(32, 8, d, 4096) for d in (64, 128))
    assert tile_of(narrow, 512, nvidia) != tile_of(wide, 512, nvidia)
    assert tile_of(narrow, 512, replace(nvidia, wave=64)).waves == 4


def test_short_chunks_share_out_their_keys():
    nvidia, layer = resolve("nvidia"), Attention(32, 8, 128, 4096)
    tiles = {m: tile_of(layer, m, nvidia) for m in (16, 64, 512)}
    assert tiles[16].parts == tiles[64].parts == 4 and tiles[512].parts == 1
    assert tile_of(layer, 64, replace(nvidia, units=16)) == tiles[512]  # a small GPU is busy anyway


@pytest.mark.parametrize(
    "m, d, layout, message",
    [
        (24, 64, "", "multiples of 16 tokens"),
        (16, 64, "rows", "int8"),
        (16, 2048, "", "shared memory"),
        (16, 20, "", "multiples of 8"),
    ],
)
def test_what_does_not_fit_is_refused(m, d, layout, message):
    with pytest.raises(UserError, match=message):
        attention(Case(4, 2, d, m, layout).op, resolve("nvidia"), "k")
