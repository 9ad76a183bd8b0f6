"""The static model follows attention: loops whose turns come from the tokens' state, work that differs between
waves."""

import itertools
from math import prod

import pytest
from assembly import END, GFX1100

from mlc_amd.compiler.tuning import isa_costs
from mlc_amd.compiler.tuning.build import build
from mlc_amd.compiler.tuning.isa_trace import ARGUMENTS, Arguments, Program
from mlc_amd.compiler.tuning.isa_values import Values, parts
from mlc_amd.compiler.tuning.static import EACH, codes_of, estimate, follow
from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.gpu import arch as archs
from mlc_amd.schedules.gpu import attention_prefill, attention_prefill_dot, profiles
from mlc_amd.schedules.tuning.workload import Workload

# The wave's number comes out of v0, the tokens out of the state, whose address is the second argument.
STATE = (
    """kernel:
	s_load_b64 s[4:5], s[0:1], 0x8
	v_bfe_u32 v1, v0, 10, 10
	s_load_b32 s6, s[4:5], 0x0
	v_readfirstlane_b32 s7, v1
	v_med3_i32 v2, s6, 0, 0xff
	v_readfirstlane_b32 s6, v2
	v_cmp_ge_i32_e32 vcc_lo, s7, v2
	s_cbranch_vccnz .LBB0_2
.LBB0_1:
	v_dot2_f32_f16 v5, v0, v1, v5
	s_add_i32 s7, s7, 4
	s_cmp_lt_i32 s7, s6
	s_cbranch_scc1 .LBB0_1
.LBB0_2:
"""
    + END
)


def test_waves_take_their_own_share_of_the_state():
    followed = Program(STATE, "kernel", GFX1100, 32, (16, 1, 1), Arguments(2, 1))

    def turns(wave, tokens):
        return followed.run((0, 0, 0), wave, [tokens, 1, 0, 0]).counts["v_dot2_f32_f16"]

    assert [turns(wave, 9) for wave in range(4)] == [3, 2, 2, 2]
    assert turns(0, 1) == 1 and turns(1, 1) == 0 and turns(0, -5) == 0 and turns(0, 1000) == 64
    assert (
        followed.run((0, 0, 0)).counts["v_dot2_f32_f16"] == 1
    )  # without a state: once, as any loop that memory decides on
    with pytest.raises(ValueError, match="turns"):
        followed.run((0, 0, 0), certain=True)


def test_arguments_lie_in_memory():
    found = Arguments(3, 2).memory(ARGUMENTS, [7, 8, 0, 0])
    state = found[ARGUMENTS + 16] | found[ARGUMENTS + 20] << 32
    assert [found[state + 4 * i] for i in range(4)] == [7, 8, 0, 0]
    found = Arguments(3, 2, table=True).memory(ARGUMENTS, [7, 8, 0, 0])
    table = found[ARGUMENTS] | found[ARGUMENTS + 4] << 32
    assert found[(found[table + 16] | found[table + 20] << 32) + 4] == 8 and ARGUMENTS + 8 not in found


def test_values_that_all_lanes_share():
    values = Values(arrival=3)
    values.values["s4"] = 9
    for text in (
        "v_mov_b32_e32 v1, s4",
        "v_sub_nc_u32_e64 v2, v1, 10 clamp",
        "v_dual_mov_b32 v3, 5 :: v_dual_add_nc_u32 v4, s4, v1",
    ):
        name, _, rest = text.partition(" ")
        for one in parts(name, [operand.strip() for operand in rest.split(",")]):
            values.execute(*one)
    assert [values.lanes[i] for i in range(1, 5)] == [9, 0, 5, 18]
    values.execute("v_add_co_u32", ["v1", "s7", "v1", "-9"])
    values.execute("v_sub_co_u32", ["v4", "vcc_lo", "v4", "s4"])
    assert values.lanes[1] == 0 and values.values["s7"] and values.lanes[4] == 9 and values.values["vcc"] == 0
    values.execute("s_mul_hi_u32", ["s5", "s4", "0x40000000"])
    values.execute("global_load_b32", ["v1", "v9", "s[2:3]"])
    values.execute("v_readfirstlane_b32", ["s6", "v1"])
    assert values.values["s5"] == 2 and values.values["s6"] is None
    values.execute("global_atomic_add_u32", ["v1", "v9", "v2", "s[2:3] glc"])
    values.execute("v_readfirstlane_b32", ["s6", "v1"])
    assert values.values["s6"] == 3  # what arrived before


def attention_task(m, heads=8, kv_heads=2, d=128, ctx=8192, act="rows"):
    args = {"heads": heads, "kv_heads": kv_heads, "d": d, "ctx": ctx}
    if m > 1:
        return Workload("attention", args | {"m": m, "act": act})
    return Workload("rope_attention", args | {"neox": True, "rotary": d, "eps": None, "act": act})


def attention(kind, arch, m, folder, plan=None, **shape):
    """The launch of an attention kernel."""
    candidate = build(attention_task(m, **shape), plan, kind, arch, folder / "candidate")
    (codes,) = codes_of([candidate], {"rocm": archs.resolve, "vulkan": profiles.resolve}[kind](arch))
    if isinstance(codes, str):
        pytest.skip(codes)
    (code,) = codes
    return code


def shares(code, machine, state, *prefixes):
    """Instructions of all lanes of all waves, in a state."""
    counts = follow(code, machine, EACH, state).counts
    return sum(n for name, n in counts.items() if name.startswith(prefixes)) * prod(code.grid) * code.threads


@pytest.mark.parametrize("arch", ["gfx942", "gfx1030", "gfx1201"])
def test_decoding_reads_the_live_keys(arch, tmp_path):
    """Two products of two elements for each key and column of the heads, and the scores of the token's own key."""
    code, machine = attention("rocm", arch, 1, tmp_path, heads=32, kv_heads=16), isa_costs.machine(archs.resolve(arch))
    for live in (512, 1024, 4096):
        assert shares(code, machine, [live, 1, 0, 0], "v_dot2") == pytest.approx(
            32 * 128 * live + 32 * 128 / 2, rel=1e-9
        )


def test_twice_the_live_tokens_take_twice_the_time(tmp_path):
    code, machine = attention("rocm", "gfx1100", 1, tmp_path, heads=32, kv_heads=32, ctx=16384), GFX1100
    times = [
        estimate([code], live * 2 * 32 * 128 * 2, machine, EACH, state=[live, 1, 0, 0]).seconds
        for live in (4096, 8192, 16383)
    ]
    assert all(1.75 < (b - isa_costs.LAUNCH) / (a - isa_costs.LAUNCH) < 2.05 for a, b in itertools.pairwise(times)), (
        times
    )


@pytest.mark.parametrize(
    ("arch", "instruction", "products"),
    [("gfx942", "v_mfma", 16**3), ("gfx1100", "v_wmma", 16**3), ("gfx1030", "v_dot2", 2)],
)
def test_prefill_sees_the_keys_before(arch, instruction, products, tmp_path):
    """Causal: what later workgroups do more is in the mean; tiles and blocks of keys round it up a little. No register
    is spilled."""
    resolved = archs.resolve(arch)
    code, machine = (
        attention("rocm", arch, 256, tmp_path, act="half" if resolved.matrix else "rows"),
        isa_costs.machine(resolved),
    )
    assert code.kernel.scratch == code.kernel.vgpr_spills == code.kernel.sgpr_spills == 0
    counts = {}
    for before in (0, 1024, 2048):
        wanted = 2 * 8 * 128 * sum(before + i + 1 for i in range(256))
        lanes = 1 if instruction == "v_dot2" else resolved.wave
        counts[before] = shares(code, machine, [before, 256, 0, 0], instruction) / lanes * products
        assert 0.98 < counts[before] / wanted < (1.35 if before == 0 else 1.05)
    times = {before: estimate([code], 1e6, machine, EACH, state=[before, 256, 0, 0]).seconds for before in (1024, 2048)}
    assert times[2048] / times[1024] == pytest.approx(counts[2048] / counts[1024], rel=0.15)


@pytest.mark.parametrize(("arch", "unit"), [("gfx942", "v_mfma"), ("gfx1100", "v_wmma")])
def test_loops_that_end_with_a_carry(arch, unit, tmp_path):
    """LLVM counts this plan's turns in a vector register."""
    machine, plan = isa_costs.machine(archs.resolve(arch)), attention_prefill.Plan(threads=128, blocks=1)
    code = attention("rocm", arch, 64, tmp_path, plan, heads=4, kv_heads=4, ctx=4096, act="half")
    wanted = 2 * 4 * 128 * sum(2048 + i + 1 for i in range(64))
    made = shares(code, machine, [2048, 64, 0, 0], unit) / code.kernel.wave * 16**3
    assert 1 <= made / wanted < 1.05


@pytest.mark.parametrize(("m", "plan"), [(1, None), (64, None), (64, attention_prefill_dot.Plan(threads=32))])
def test_radvs_attention_is_followed(m, plan, tmp_path):
    """Workgroups of one wave, too, whose number no register holds."""
    try:
        code, machine = (
            attention("vulkan", "vangogh", m, tmp_path, plan),
            isa_costs.machine(profiles.resolve("vangogh")),
        )
    except UserError as error:
        pytest.skip(str(error))
    live = {before: shares(code, machine, [before, m, 0, 0], "v_fma_mix_f32") for before in (256, 512, 768)}
    assert 0.8 * 8 * 128 * 2 * m * 256 < live[512] - live[256] < 1.2 * 8 * 128 * 2 * m * 256
    assert live[768] - live[512] == live[512] - live[256]
