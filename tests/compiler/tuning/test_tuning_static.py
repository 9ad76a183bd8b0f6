"""The static model of AMD GPUs: what it reads out of assembly, how it weighs it, and the records that are shipped on
its word."""

import json
from dataclasses import asdict, replace
from math import prod

import pytest
from assembly import END, GFX1100
from workloads import operator

from mlc_amd.compiler.codegen import hsaco, radv
from mlc_amd.compiler.codegen.rocm import compile_hsaco
from mlc_amd.compiler.gguf.synthetic import PRESETS
from mlc_amd.compiler.tuning import isa_costs
from mlc_amd.compiler.tuning.database import SHIPPED, Lookup
from mlc_amd.compiler.tuning.isa_trace import Program
from mlc_amd.compiler.tuning.static import Code, Estimate, Static, combine, few_waves, follow, run_of
from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.gpu.base import arch as archs
from mlc_amd.schedules.gpu.base import profiles
from mlc_amd.schedules.gpu.linear.gemm import linear as gemm
from mlc_amd.schedules.gpu.linear.gemv import Plan, gate_up_swiglu, linear
from mlc_amd.schedules.space import space
from tests.dev import ship_tuned
from tests.dev.static_correlation import spearman

LOOP = (
    """kernel:
	s_mov_b32 s4, 0
	s_cmpk_gt_i32 s15, 0x7
	s_cbranch_scc1 .LBB0_3
.LBB0_1:
	global_load_b128 v[0:3], v4, s[2:3]
	s_add_i32 s4, s4, 2
	s_waitcnt vmcnt(0)
	v_dot4_i32_iu8 v5, v0, v1, v5
	v_dot4_i32_iu8 v5, v2, v3, v5
	s_cmp_lg_u32 s4, 10
	s_cbranch_scc1 .LBB0_1
	v_exp_f32_e32 v5, v5
.LBB0_3:
"""
    + END
)


def program(text, grid=(16, 1, 1)):
    return Program(text, "kernel", GFX1100, 32, grid)


def linear_task(fmt="q4_0", n=4096, k=4096, m=1, layout="rows"):
    return operator(
        "linear", {"segments": [[fmt, n]], "k": k, "m": m, "layout": layout, "biases": [False], "residual": True}
    )


# ---- following a wave


def test_loops_run_as_often_as_their_counters_say():
    trace = program(LOOP).run((0, 0, 0))
    assert (
        trace.counts["global_load_b128"] == 5
        and trace.counts["v_dot4_i32_iu8"] == 10
        and trace.counts["v_exp_f32_e32"] == 1
    )
    assert trace.busy["valu"] == 10 + isa_costs.SLOW and trace.busy["memory"] == 5 * 16 * 32 / GFX1100.family.memory
    # every turn waits for its load; nothing else takes as long
    assert 5 * GFX1100.latency < trace.clocks < 5 * GFX1100.latency + 60


def test_workgroups_take_their_own_branch():
    assert program(LOOP).run((8, 0, 0)).counts["v_dot4_i32_iu8"] == 0


def test_loads_under_way_together_are_waited_for_once():
    early = LOOP.replace("s_waitcnt vmcnt(0)", "s_waitcnt vmcnt(4)")
    assert program(early).run((0, 0, 0)).clocks < 2 * GFX1100.latency


def test_unknown_branches_skip_nothing_and_leave_loops():
    """A loop of 0 or 1 iterations whose count comes from memory, as in kernels that end early without live tokens."""
    text = """kernel:
	s_load_b32 s0, s[2:3], 0x4
	s_mov_b32 s3, 0
.LBB0_1:
	s_cmp_ge_i32 s3, s0
	s_cbranch_scc1 .LBB0_3
	s_cbranch_vccnz .LBB0_2
	v_dot4_i32_iu8 v5, v0, v1, v5
.LBB0_2:
	s_add_i32 s3, s3, 1
	s_branch .LBB0_1
.LBB0_3:
	s_endpgm
"""
    assert program(text).run((0, 0, 0)).counts["v_dot4_i32_iu8"] == 1


def test_endless_loops_are_an_error():
    with pytest.raises(ValueError, match="does not end"):
        program("kernel:\n.LBB0_1:\n\tv_mov_b32 v0, v1\n\ts_branch .LBB0_1\n").run((0, 0, 0))
    with pytest.raises(ValueError, match="no kernel"):
        program("other:\n\ts_endpgm\n")


def compiled(func, arch):
    """The launch of a kernel."""
    module = compile_hsaco({"kernel": func}, arch)
    (launch,) = module.functions["kernel"].launches
    return Code(hsaco.parse(module.hsaco).kernels[launch.symbol], module.assembly, launch.grid, prod(launch.block))


def executed(code, arch, *prefixes, kinds=1):
    """Of all lanes of all waves."""
    counts = follow(code, isa_costs.machine(arch), kinds).counts
    waves = prod(code.grid) * code.threads // code.kernel.wave
    return sum(n for name, n in counts.items() if name.startswith(prefixes)) * waves


@pytest.mark.parametrize("arch", ["gfx906", "gfx942", "gfx1030", "gfx1100", "gfx1201"])
def test_every_product_is_counted(arch):
    """Dynamic counts against what the operators must do: 4 products a lane and instruction."""
    arch = archs.resolve(arch)
    gemv = compiled(
        linear([("q4_0", 4096), ("q4_k", 1024), ("q6_k", 1024)], 4096, 1, "rows", (False,) * 3, False, arch, "kernel"),
        arch,
    )
    assert executed(gemv, arch, "v_dot4", kinds=3) * arch.wave * 4 == 6144 * 4096
    pair = compiled(gate_up_swiglu("q8_0", "q8_0", 1024, 2048, 1, "rows", "rows", arch, "kernel"), arch)
    assert executed(pair, arch, "v_dot4") * arch.wave * 4 == 2 * 1024 * 2048
    many = compiled(
        gemm([("q4_0", 1024)], 2048, 512, "half" if arch.matrix else "rows", (False,), True, arch, "kernel"), arch
    )
    products = 512 * 1024 * 2048
    if arch.matrix:
        assert executed(many, arch, "v_wmma", "v_mfma") * 16**3 == products
    else:
        assert executed(many, arch, "v_dot4") * arch.wave * 4 == products


def test_radv_code_is_followed():
    with Static("vulkan", "vangogh", workers=1) as static:
        try:
            (found,) = static.estimates([(linear_task(), Plan(4, 4, 32, 2))])
        except UserError as error:
            pytest.skip(str(error))
    ((code, trace),) = found.launches
    waves = prod(code.grid) * code.threads // 32
    assert sum(n for name, n in trace.counts.items() if name.startswith("v_dot4")) * waves * 32 * 4 == 4096 * 4096


# ---- the model


def test_what_makes_kernels_slow():
    code = Code(hsaco.Kernel("kernel", 32, 128, 64, 0, 32, 0, 0, 0, 0, 1024, 0, ()), LOOP, (4096, 1, 1), 128)
    moved = 20e6

    def seconds(code, run=float("inf")):
        return combine([(code, follow(code, GFX1100))], moved, GFX1100, run).seconds

    usual = seconds(code)
    assert usual > moved / GFX1100.bandwidth + isa_costs.LAUNCH
    assert seconds(replace(code, kernel=replace(code.kernel, scratch=16))) > 1.5 * usual
    assert seconds(replace(code, kernel=replace(code.kernel, vgprs=250))) > usual  # few waves
    assert seconds(replace(code, kernel=replace(code.kernel, lds=60 << 10))) > usual  # few workgroups
    assert seconds(replace(code, grid=(8192, 1, 1))) > usual
    assert seconds(code, run=128) > seconds(code, run=1024) > usual
    with pytest.raises(ValueError, match="vgprs"):
        seconds(replace(code, kernel=replace(code.kernel, vgprs=5000)))


def test_bytes_read_at_once():
    arch = archs.resolve("gfx1100")
    assert run_of(linear_task(), Plan(4, 4, 32, 2), arch) == 2 * run_of(linear_task(), Plan(4, 4, 16, 2), arch)
    row = 1024 * 18 / 32
    assert run_of(linear_task(k=1024), Plan(4, 4, 32, 8), arch) == 4 * row  # whole rows
    assert run_of(linear_task(m=16), None, arch) == float("inf")


def test_instructions_cost_what_tables_say():
    cdna = isa_costs.machine(archs.resolve("gfx942"))
    assert GFX1100.cost("v_dot4_i32_iu8", 32, 4) == ("valu", 1) and GFX1100.cost("v_rcp_f32_e32", 32, 4) == (
        "valu",
        isa_costs.SLOW,
    )
    assert (
        cdna.cost("v_add_f32_e32", 64, 4) == ("valu", 4) and cdna.cost("v_mfma_f32_32x32x8_f16", 64, 4)[0] == "matrix"
    )
    assert GFX1100.cost("v_wmma_f32_16x16x16_f16", 32, 4)[1] == 2 * 16**3 / 256  # 512 operations a clock for two SIMDs
    assert GFX1100.cost("s_waitcnt", 32, 4)[0] == isa_costs.NONE


PROFILES = [profiles.resolve(name) for name in ("vangogh", "rdna3", "gfx90c")]


@pytest.mark.parametrize("arch", [*archs.ARCHS.values(), *PROFILES], ids=lambda arch: arch.name)
def test_every_amd_gpu_has_a_model(arch):
    assert isa_costs.machine(arch).bandwidth < arch.bandwidth * 1e9


@pytest.mark.parametrize(("kind", "arch"), [("cpu", "native"), ("vulkan", "nvidia"), ("vulkan", "lavapipe")])
def test_other_machines_have_none(kind, arch):
    with pytest.raises(UserError, match="static ranking"):
        Static(kind, arch)


# ---- tuning with it


def test_measure():
    workload = linear_task("q4_0", 1024, 1024)
    found = space(workload, archs.resolve("gfx1100"))
    slow = Plan(16, 8, 8, 1)
    with Static("rocm", "gfx1100", workers=1) as static:
        default, other, wrong = static.measure(
            [(workload, found.default), (workload, slow), (linear_task(m=3), found.default)]
        )
        assert default.runner == "static" and default.error == "" and 0 < default.seconds < other.seconds < 1e-3
        assert wrong.seconds is None and wrong.error


def test_gemm_plans_with_low_occupancy_are_not_preferred():
    """More shared memory than the default's, so that a compute unit holds one workgroup instead of three."""
    args = {"segments": [["q4_0", 2048], ["q4_0", 1024], ["q4_0", 1024]], "k": 1024, "m": 512, "layout": "half"}
    workload = operator("linear", args | {"biases": [False] * 3, "residual": False})
    found = space(workload, archs.resolve("gfx942"))
    plan = found.plan_type(128, 128, 64, 2, 2, 1, 1)
    with Static("rocm", "gfx942", workers=1) as static:
        default, low = static.measure([(workload, found.default), (workload, plan)])
        estimates = static.estimates([(workload, found.default), (workload, plan)])
    assert default.seconds and low.seconds is None and "waves per SIMD" in low.error
    assert estimates[1].waves < estimates[0].waves

    def waves(count):
        return Estimate(1.0, count, [])

    assert few_waves(workload, waves(1), waves(1)) and few_waves(workload, waves(3), waves(4))
    assert not few_waves(workload, waves(4), waves(4)) and not few_waves(linear_task(), waves(3), waves(4))


def test_attention_is_not_modelled():
    args = {"heads": 8, "kv_heads": 2, "d": 64, "ctx": 1024, "m": 64, "single": 0, "layout": "half"}
    workload = operator("attention", args)
    with Static("rocm", "gfx1100", workers=1) as static:
        assert not static.serves(workload) and static.serves(linear_task())
        (found,) = static.measure([(workload, space(workload, static.arch).default)])
    assert found.seconds is None and "not modelled" in found.error


def test_crashing_drivers_are_errors(monkeypatch):
    """RADV refuses one kernel, the others have their times."""
    real = radv.statistics

    def refusing(shaders, profile):
        report = real(shaders[1:], profile)
        return replace(report, refused={shaders[0].name: "it crashed"})

    monkeypatch.setattr(radv, "statistics", refusing)
    with Static("vulkan", "vangogh", workers=1) as static:
        try:
            first, second = static.measure([(linear_task(), Plan(4, 4, 32, 2)), (linear_task(), Plan(2, 4, 32, 2))])
        except UserError as error:
            pytest.skip(str(error))
    assert first.error == "it crashed" and second.seconds > 0


FILES = sorted(SHIPPED.glob("*.json"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_shipped_records_are_used(path):
    """They were verified, are better than the default, are plans of today's spaces, and are what a compile finds."""
    data = json.loads(path.read_text())
    arch = {"rocm": archs.resolve, "vulkan": profiles.resolve}[data["api"]](data["arch"])
    shipped = Lookup(arch, "shipped")
    for record in data["records"]:
        workload = from_json(record)
        plan, source = shipped.find(workload)
        assert source == "shipped" and asdict(plan) == record["plan"] != asdict(space(workload, arch).default)
        assert record["passed"] and record["checked"].startswith("emulator") and record["runner"] == "static"
        assert record["seconds"] * (1 + ship_tuned.margin(workload)) < record["default_seconds"]
        assert "attention" not in workload.op
    assert data["records"] and not shipped.notes


def test_a_compile_finds_shipped_records(monkeypatch):
    """The workloads that a model's operators become are those of the records: names and order of the arguments too."""
    monkeypatch.setitem(PRESETS["llama2-7b"].keys, "block_count", 2)
    found = {
        (path.stem, workload.op)
        for path in FILES
        for workload in ship_tuned.tasks(("llama2-7b",), ("q4_k", "q8_0"), "rocm", path.stem)
        if Lookup(archs.resolve(path.stem), "shipped").find(workload)[1] == "shipped"
    }
    assert found == {("gfx1100", "linear"), ("gfx942", "gate_up")}


def test_kernels_without_a_record_have_the_default():
    assert Lookup(archs.resolve("gfx1100"), "shipped").find(linear_task()) == (None, "default")


def test_shipped_gemm_plans_keep_the_occupancy():
    """One of each plan: shapes hardly matter for registers and shared memory."""
    for path in FILES:
        data = json.loads(path.read_text())
        records = {json.dumps(record["plan"]): record for record in data["records"] if record["args"]["m"] > 1}
        with Static(data["api"], data["arch"], workers=1) as static:
            workloads = [from_json(record) for record in records.values()]
            plans = [space(w, static.arch).parse(r["plan"]) for w, r in zip(workloads, records.values(), strict=True)]
            found = static.measure(list(zip(workloads, plans, strict=True)))
        assert [one.error for one in found] == [""] * len(records)


def test_formats_share_their_shapes(monkeypatch):
    """What `ship_tuned.tasks` makes of one format's tasks are the other's."""
    monkeypatch.setitem(PRESETS["llama3-1b"].keys, "block_count", 2)
    renamed, own = (
        ship_tuned.tasks(("llama3-1b",), formats, "rocm", "gfx1100") for formats in (("q4_0", "q6_k"), ("q6_k",))
    )
    assert set(own) < set(renamed)


# ---- the correlation


def test_spearman():
    assert spearman([1, 2, 3, 4], [10, 20, 30, 1000]) == pytest.approx(1)
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    assert spearman([1, 1, 2, 2], [1, 2, 3, 4]) == pytest.approx(0.8944, abs=1e-4)  # ties share their rank
    assert spearman([1, 1, 1], [1, 2, 3]) == 0
