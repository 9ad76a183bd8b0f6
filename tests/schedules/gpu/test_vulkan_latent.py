"""Prefill of latent attention on cooperative matrices (`attention_latent.py`), against numpy in float64.

Kernels for NVIDIA's GPUs run in the SPIR-V emulator, others are compiled and looked at. Cases as in
`test_vulkan_attention_coop.py`.
"""

from dataclasses import replace

import numpy as np
import pytest
from attention_cases import Case, Rows, check_attention
from spirv_emulation import execute

from mlc_amd.compiler.codegen.spirv import compile_spirv
from mlc_amd.compiler.codegen.spirv_reader import read
from mlc_amd.schedules.gpu.attention.attention import attention
from mlc_amd.schedules.gpu.base.profiles import resolve
from mlc_amd.schedules.gpu.latent.attention_latent import tiles_of
from mlc_amd.schedules.gpu.latent.attention_latent_decode import LatentDecodePlan
from mlc_amd.schedules.gpu.latent.attention_latent_tiles import Tile, lds_bytes, shape_of, tile_of
from mlc_amd.schedules.operators.attention import Attention, CausalAttention

NVIDIA = resolve("nvidia")
LATENT = {"values": 64, "scale": 0.1}
CASES = {
    # five tiles, one of which has splits where it sees enough keys
    "heads_5": (Case(5, 1, 96, 16, "", states=((57, 13), (300, 16), (300, 3))), Tile(2, 16, 16, 1)),
    "buffers": (Case(4, 1, 96, 16, "pairs", states=((300, 16),)), Tile(2, 16, 16, 2)),
    "parts": (Case(3, 1, 64, 32, "pairs", states=((0, 32), (100, 31))), Tile(4, 32, 16, 2)),
    "row_fragments": (Case(3, 1, 64, 32, "", states=((65, 29),)), Tile(4, 32, 16, 1, 1)),
    "keys_32": (Case(2, 1, 64, 32, "", states=((33, 32),)), Tile(4, 16, 32, 1, 0)),
    "codes": (Case(4, 1, 96, 16, "", states=((300, 16),), attributes={"kv": "q8_0"}), Tile(2, 16, 16, 2)),
    "mixed": (Case(4, 1, 96, 32, "pairs", several=8, states=(Rows((130, 5, 299), (57, 20)), Rows((3,) * 7, (0, 25)))),
              Tile(2, 16, 16, 1)),
}  # fmt: skip


def run(name):
    """What runs the case's kernel on arrays by name."""
    case, tile = ALL[name]
    case = case._replace(attributes=LATENT | dict(case.attributes))
    kernel = attention(case.op, NVIDIA, "k", tile)
    return lambda arrays: execute(kernel, arrays, NVIDIA)


def compare(name, **how):
    case, _ = ALL[name]
    check_attention(case._replace(attributes=LATENT | dict(case.attributes)), run(name), **how)


LONG = tuple((length - 1, 1) for length in (1, 33, 300))
# decoding and a chunk on matrices
CASES["mixed_16"] = Case(16, 1, 64, 16, several=8, states=(Rows((130, 5), (57, 9)),)), Tile(4, 16, 16, 1)
DECODE = {
    "one": (Case(16, 1, 64, 1, "rows", states=LONG), LatentDecodePlan(4, 16, 16, 1, fill=2, least=2)),
    "two_fragments": (Case(20, 1, 64, 1, "", states=LONG), LatentDecodePlan(4, 32, 16, 1, 0, fill=1, least=1)),
    "two_parts": (Case(20, 1, 64, 1, "", states=LONG), LatentDecodePlan(4, 16, 16, 2, fill=4, least=1)),
    "several": (Case(20, 1, 64, 8, "", several=8, states=(Rows((130, 5, 299)), Rows((0,) * 8))),
                LatentDecodePlan(4, 32, 16, 1, 0, fill=3, least=1)),
}  # fmt: skip
ALL = CASES | DECODE
QUICK = ("one", "codes")


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.full) for name in ALL])
def test_attention(name):
    compare(name)


@pytest.mark.full
def test_scores_that_grow():
    compare("buffers", grow=60)


@pytest.mark.parametrize(
    "heads", [pytest.param(16, marks=pytest.mark.full), 20, pytest.param(128, marks=pytest.mark.full)]
)
@pytest.mark.parametrize("arch", ["nvidia", "rdna3", pytest.param("rdna4", marks=pytest.mark.full)])
def test_default_tiles_fit(heads, arch):
    """DeepSeek V2 Lite, GLM 4.7 Flash and DeepSeek V3."""
    profile, layer = resolve(arch), Attention(heads, 1, 576, 4096, values=512)
    tile = tile_of(layer, profile)
    module = compile_spirv(
        {"k": attention(CausalAttention(layer=layer, m=512, single=0, layout="pairs"), profile, "k")}, profile
    ).modules
    kernel, *_ = module.values()
    facts = read(kernel.binary)
    assert facts.matrix and facts.lds == kernel.lds == lds_bytes(tile, layer, profile) <= profile.lds
    assert np.prod(kernel.block) == tile.waves * profile.wave <= profile.threads
    assert len(kernel.binary) < 100_000


def test_tiles_keep_all_units_busy():
    nvidia, tile = replace(resolve("nvidia"), units=132), Tile(rows=32, fill=2)
    assert tiles_of(tile, 512 * 20, nvidia)[:3] == (264, 56, 4)
    assert tiles_of(tile, 64 * 20, nvidia)[:3] == (0, 40, 6)
    assert tiles_of(tile, 264 * 32, nvidia)[:3] == (264, 0, 1)
    assert tiles_of(tile, 400 * 32, nvidia)[:3] == (400, 0, 1)  # more than half of the units have one more


def test_other_layers_take_no_matrices():
    nvidia, layer = resolve("nvidia"), Attention(4, 1, 48, 128, values=40)
    assert tile_of(layer, nvidia) is None  # not whole fragments of values
    for arch, of in ((nvidia, layer), (resolve("vangogh"), Attention(4, 1, 48, 128, values=32))):
        (kernel,) = compile_spirv(
            {"k": attention(CausalAttention(layer=of, m=64, single=0, layout=""), arch, "k")}, arch
        ).modules.values()
        assert not read(kernel.binary).matrix


@pytest.mark.parametrize("tile", [Tile(3), Tile(rows=24), Tile(keys=64), Tile(waves=2, rows=64)])
def test_tiles_that_do_not_suit(tile):
    layer = Attention(20, 1, 576, 128, values=512)
    assert not shape_of(tile, layer, resolve("nvidia"))
    with pytest.raises(ValueError, match="does not suit"):
        attention(CausalAttention(layer=layer, m=64, single=0, layout=""), resolve("nvidia"), "k", tile)
