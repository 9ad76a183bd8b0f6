"""RoPE with cache writes, and attention, on emulated AMD GPUs against numpy in float64 (`attention_cases.py`).

Registers, LDS and scratch buffers start as garbage, waves run in shuffled order, and `emulate` fails where LDS is not
waited for.
"""

import functools
import re

import pytest
from attention_cases import CTX, Case, Rows, check_attention, check_rope
from samples import sample

from mlc_amd.compiler.codegen.rocm import compile_hsaco
from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.gpu.attention import attention_prefill, attention_prefill_dot
from mlc_amd.schedules.gpu.attention.attention import attention
from mlc_amd.schedules.gpu.attention.attention_splits import splits_of
from mlc_amd.schedules.gpu.attention.attention_step import attention_step
from mlc_amd.schedules.gpu.attention.cache import cache_types
from mlc_amd.schedules.gpu.attention.kv_write import rope_kv_write
from mlc_amd.schedules.gpu.base.arch import resolve
from mlc_amd.schedules.gpu.base.step import builder
from mlc_amd.schedules.operators.attention import Attention, Rope
from tests.dev.gfxemu import emulate

ARCHS = ("gfx1100", "gfx1201", "gfx942")
WAVE_ORDER = 3  # a seed: shuffled
# Windows that begin within a block of keys (64, with matrix units 32) and with one, in one block and in several,
# smaller than a chunk and larger; positions before the window is full, at a block's edge, and far past it.
NEAR, FAR = ((0, 1), (63, 1), (103, 1)), ((64, 1), (500, 1))
DECODE = {
    "decode_group_4": Case(8, 2, 64),
    "decode_group_1": Case(2, 2, 96, layout="pairs", rope=Rope(True, 48)),
    "decode_group_2": Case(2, 1, 128, layout="rows", rope=Rope(True, 128, 1e-6)),
    "decode_group_7": Case(7, 1, 64, layout="rows", rope=Rope(False, 64)),
    "decode_head_24": Case(2, 1, 24, rope=Rope(True, 24, 1e-6), states=NEAR),
    "decode_window": Case(2, 1, 64, rope=Rope(True, 64), states=NEAR + FAR, attributes={"window": 40}),
    "decode_window_of_a_page": Case(
        2, 1, 64, rope=Rope(True, 64), states=(*NEAR, (64, 1), (500, 1)),
        attributes={"window": 64, "sinks": True},
    ),
    "decode_window_300": Case(2, 1, 64, states=((10, 1), (450, 1)), attributes={"window": 300}),
    "decode_chunk": Case(
        2, 1, 64, rope=Rope(True, 64), states=((39, 1), (40, 1), (500, 1)), attributes={"chunk": 40}
    ),
    "decode_attributes": Case(
        4, 1, 64, states=((5, 1), (500, 1)),
        attributes={"window": 300, "softcap": 4.0, "sinks": True, "scale": 0.2},
    ),
    "decode_norm_after": Case(
        2, 1, 64, rope=Rope(False, 48, 1e-6, norm_after=True, value_norm=True), states=NEAR
    ),
    "decode_reads": Case(4, 1, 64, rope=Rope(True, 64, 1e-6, writes=False), states=NEAR),
    # on matrix units of all three
    "decode_units_80": Case(8, 1, 80, layout="pairs", rope=Rope(True, 80, 1e-6), states=((0, 1), (130, 1))),
    "decode_units_q8": Case(
        16, 2, 128, rope=Rope(False, 128), states=NEAR + FAR, attributes={"kv": "q8_0", "window": 90, "sinks": True}
    ),
    "decode_q8": Case(2, 1, 128, layout="rows", rope=Rope(True, 48, 1e-6), states=NEAR, attributes={"kv": "q8_0"}),
    "decode_units_q4": Case(
        16, 2, 128, states=NEAR + FAR, attributes={"kv": "q4_0", "window": 90, "sinks": True}, back=True
    ),
    "decode_q4": Case(2, 1, 128, layout="rows", states=NEAR, attributes={"kv": "q4_0"}, back=True),
    "decode_rope_attributes": Case(
        4, 1, 64, rope=Rope(True, 0), states=((0, 1), (200, 1)),
        attributes={"softcap": 3.0, "sinks": True, "scale": 0.3},
    ),
}  # fmt: skip
ROWS = {
    "rows": Case(4, 2, 64, 8, several=8, states=(Rows((0, 130, CTX - 1)), Rows((299, 5, 64, 63, 0, 128, 200, 400)))),
    "rows_window": Case(
        2, 1, 64, 4, several=4, states=(Rows((CTX - 1, 63, 64)),), attributes={"window": 40, "sinks": True}
    ),
    "rows_units": Case(
        8, 1, 64, 8, "rows", several=8, rope=Rope(True, 64, 1e-6), states=(Rows((0, 200, 3)), Rows((70,), (125, 5)))
    ),
    "mixed": Case(4, 1, 64, 32, "pairs", several=8, states=(Rows((130, 5, 299), (57, 13)), Rows((), (0, 30)))),
    "mixed_q8": Case(4, 2, 64, 32, several=8, states=(Rows((130, 5, 299), (57, 13)),), attributes={"kv": "q8_0"}),
    "mixed_q4": Case(4, 2, 64, 32, several=8, states=(Rows((130, 5, 299), (57, 13)),), attributes={"kv": "q4_0"}),
    "mixed_q8_q4": Case(
        4, 2, 64, 32, several=8, states=(Rows((130, 5, 299), (57, 13)),), attributes={"kv": "q8_0/q4_0"}
    ),
    "mixed_image": Case(
        4, 1, 64, 64, several=8, states=(Rows((130, 5, 299), (57, 50), 33),), attributes={"images": True}
    ),
    "mixed_window": Case(
        2, 1, 64, 32, several=8, states=(Rows((CTX - 1, 64), (450, 30)),), attributes={"window": 49, "softcap": 4.0}
    ),
}  # fmt: skip
PREFILL = {
    "prefill_group_1": Case(2, 2, 96, 16, "pairs", states=((0, 16), (57, 13), (64, 1), (CTX - 16, 16))),
    "prefill_group_4": Case(4, 1, 128, 64, "pairs", states=((0, 64), (57, 50))),
    "prefill_group_7": Case(7, 1, 64, 16, "", states=((33, 16), (300, 3))),
    "prefill_head_40": Case(3, 1, 40, 16, "", states=((57, 13),)),
    "prefill_window": Case(
        1, 1, 32, 64, "", states=((0, 64), (70, 64), (400, 45)), attributes={"window": 5, "sinks": True}
    ),
    "prefill_window_of_a_page": Case(
        2, 1, 64, 16, "", states=((0, 16), (56, 16), (401, 13)), attributes={"window": 49, "sinks": True}
    ),
    "prefill_wide": Case(2, 1, 256, 16, "pairs", states=((57, 13),)),
    "prefill_apart": Case(4, 1, 64, 64, "", states=((57, 50), (130, 64))),
    "prefill_tiles": Case(
        4, 1, 64, 64, "pairs", states=((57, 50), (300, 64)), attributes={"window": 80, "softcap": 4.0, "sinks": True}
    ),
    "prefill_image": Case(
        2, 1, 64, 64, "pairs", states=(Rows((), (57, 50), 41), Rows((), (0, 64), 64), Rows((), (300, 64))),
        attributes={"images": True},
    ),
    "prefill_image_window": Case(
        4, 1, 64, 64, "", states=(Rows((), (130, 60), 37), Rows((), (5, 64), 64)),
        attributes={"images": True, "window": 20},
    ),
    "prefill_chunk": Case(2, 1, 64, 16, "", states=((30, 16), (393, 16)), attributes={"chunk": 100}),
    "prefill_attributes": Case(
        4, 1, 64, 16, "pairs", states=((30, 16), (300, 16)),
        attributes={"window": 100, "softcap": 4.0, "sinks": True, "scale": 0.2},
    ),
}  # fmt: skip
DOT = {
    "prefill_dot": Case(3, 1, 64, 16, "rows", states=((0, 16), (57, 13))),
    "prefill_dot_head_80": Case(2, 1, 80, 16, "", states=((57, 13),)),
    "prefill_dot_window": Case(2, 1, 48, 16, "", states=((401, 13),), attributes={"window": 49}),
    "prefill_dot_chunk": Case(2, 1, 32, 16, "", states=((393, 16),), attributes={"chunk": 100}),
    "prefill_dot_image": Case(
        3, 1, 64, 64, "", states=(Rows((), (57, 50), 41),), attributes={"images": True, "window": 30}
    ),
    "prefill_dot_attributes": Case(
        3, 1, 64, 16, "", states=((60, 16), (400, 13)),
        attributes={"window": 9, "softcap": 4.0, "sinks": True, "scale": 0.2},
    ),
}  # fmt: skip
ROPE = {
    "rope_neox_partial": Case(3, 1, 96, 16, rope=Rope(True, 48)),
    "rope_interleaved": Case(2, 1, 64, 1, rope=Rope(False, 64)),
    "rope_norm": Case(4, 2, 128, 16, rope=Rope(True, 128, 1e-6)),
    "rope_head_24": Case(3, 1, 24, 4, rope=Rope(True, 12, 1e-6)),
    "rope_norm_after": Case(3, 1, 24, 4, rope=Rope(True, 12, 1e-6, norm_after=True, value_norm=True)),
    "rope_reads": Case(3, 1, 64, 4, rope=Rope(True, 64, 1e-6, writes=False)),
    "rope_q8": Case(2, 1, 96, 4, rope=Rope(True, 48, 1e-6), attributes={"kv": "q8_0"}),
    "rope_q4": Case(2, 1, 128, 4, rope=Rope(True, 48, 1e-6), attributes={"kv": "q4_0"}),
    "rope_q4_256": Case(2, 1, 256, 4, rope=Rope(False, 256), attributes={"kv": "q8_0/q4_0"}),
    "rope_none": Case(2, 1, 64, 1, rope=Rope(True, 0, 1e-6), attributes={"scale": 0.3}),
}
CASES = DECODE | ROWS | PREFILL | DOT | ROPE
# Waves with rows of their own, where so few rows would be shared; with two tiles of rows.
PLANS = {
    "prefill_apart": attention_prefill.Plan(threads=64),
    "prefill_tiles": attention_prefill.Plan(keys=64, tiles=2),
}
# What takes most registers, on GPUs that differ in how many there are: of gfx906's wide waves each has the fewest.
# (Prefill with wider heads is in test_tuning_attention.py.)
REGISTERS = {
    "gfx1100": DECODE | ROWS | PREFILL | ROPE,
    "gfx1201": ("prefill_group_4", "rope_norm"), "gfx942": ("prefill_group_4", "rope_norm"),
    "gfx906": ("decode_group_7",), "gfx1010": ("decode_group_7", "rope_norm"), "gfx1030": ("decode_group_7",),
}  # fmt: skip


def build(arch, name):
    case = CASES[name]
    if name in ROPE:
        return rope_kv_write(case.write, arch, name)
    if name in DOT:
        emit = builder(lambda op, arch, state, plan: attention_prefill_dot.emit(attention_step(op, state), arch))
        return emit(case.op, arch, name)
    return attention(case.op, arch, name, PLANS.get(name))


@functools.cache
def compiled(arch_name, name):
    arch = resolve(arch_name)
    return compile_hsaco({name: build(arch, name)}, arch)


def runner(arch, name):
    return lambda arrays: emulate(compiled(arch, name), name, arrays, WAVE_ORDER)


@pytest.mark.full
@pytest.mark.emulator
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", [*DECODE, *ROWS, *PREFILL, *DOT])
def test_attention(arch, name):
    check_attention(CASES[name], runner(arch, name))


@pytest.mark.full
@pytest.mark.emulator
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", ROPE)
def test_rope_kv_write(arch, name):
    m = CASES[name].m
    # the last state has no room for more than one token
    states = {(0, m), (5, max(1, m - 3)), (CTX - 1, m), Rows((63, 64, 200, CTX - 1)[:m])}
    check_rope(CASES[name], runner(arch, name), states)


EACH_RUN = [
    ("gfx1100", name)
    for name in ("decode_units_q8", "mixed", "mixed_q8", "mixed_q4", "rope_q4", "prefill_group_4", "rope_norm")
]
EACH_RUN += [("gfx1201", "prefill_group_4"), ("gfx942", "prefill_group_4"), ("gfx906", "decode_group_7")]


@pytest.mark.parametrize(
    ("arch", "name"), sample([(arch, name) for arch, names in REGISTERS.items() for name in names], EACH_RUN)
)
def test_registers_suffice(arch, name):
    assembly = compiled(arch, name).assembly
    for field in ("private_segment_fixed_size", "vgpr_spill_count", "sgpr_spill_count"):
        assert set(re.findall(rf"\.{field}: +(\d+)", assembly)) == {"0"}, field


@pytest.mark.parametrize(
    ("heads", "kv_heads", "d", "archs"),
    [
        (32, 4, 128, {"gfx1100", "gfx1201", "gfx90a", "gfx942"}),
        (32, 8, 128, {"gfx1201", "gfx90a", "gfx942"}),  # products with 4 of 16 rows take gfx11 longer than others
        (16, 16, 128, set()),
        (32, 4, 72, set()),  # not whole tiles of columns
    ],
)
def test_heads_that_take_matrix_units(heads, kv_heads, d, archs):
    layer = Attention(heads, kv_heads, d, 16384)
    found = {name for name in ("gfx1030", "gfx1100", "gfx1201", "gfx90a", "gfx942") if _on_units(layer, name)}
    assert found == archs


def _on_units(layer, arch):
    return splits_of(layer, resolve(arch)).matrix


@pytest.mark.parametrize(
    ("arch", "waits"), [("gfx90a", 1), ("gfx942", 3), ("gfx1030", 1), ("gfx1100", 1), ("gfx1201", 1)]
)
def test_splits_publish_before_they_arrive(arch, waits):
    """A split's results are waited for before the barrier that the counter's increment follows; once, where one L2
    serves all of the GPU."""
    assembly = compiled(arch, "decode_group_4").assembly
    before = assembly[: assembly.index("global_atomic_add")]
    publish = before[: re.search(r"(.*)s_barrier(_signal)?[ \n]", before, re.S).end()]
    found = [(m.start(), m[0]) for m in re.finditer(r"global_store_\w+|s_wait\w*cnt\w* .*", publish)]
    found = [(i, text) for i, text in found if "store" in text or "vmcnt" in text or "vscnt" in text]
    first = next(i for i, text in found if text.startswith("global_store"))
    after = [text for i, text in found if i >= first]
    assert [text for text in after if text.startswith("s_wait")] == after[-1:] * waits


@pytest.mark.parametrize(("ctx", "d"), [(100, 64), (128, 20)])
def test_shapes_that_do_not_fit_are_refused(ctx, d):
    with pytest.raises(UserError, match="multiples"):
        cache_types(Attention(4, 2, d, ctx))


@pytest.mark.parametrize("m", [1, 16])
def test_int8_blocks_of_parts_of_heads_are_refused(m):
    with pytest.raises(UserError, match="blocks of 32 columns, not of heads of 48"):
        attention(Case(4, 2, 48, m, "rows").op, resolve("gfx1030"), "attention")


def test_too_many_heads_for_a_kv_head_are_refused():
    with pytest.raises(UserError, match="query heads"):
        attention(Case(34, 2, 64).op, resolve("gfx1100"), "attention")


def test_int8_from_matrix_units_is_refused():
    with pytest.raises(UserError, match="int8"):
        attention(Case(4, 2, 64, 16, "rows").op, resolve("gfx1100"), "attention")


def test_odd_rotary_is_refused():
    with pytest.raises(UserError, match="even"):
        rope_kv_write(Case(2, 1, 64, rope=Rope(True, 33)).write, resolve("gfx1100"), "rope")
