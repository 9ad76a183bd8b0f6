"""Building candidates in worker processes, verification, and both together with measuring on the CPU and on Mesa's CPU
driver."""

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from samples import sample
from vulkan_harness import gpu
from workloads import operator

from mlc_amd.compiler.tuning.build import Builder, build, folder_name, make, plan_of, target
from mlc_amd.compiler.tuning.database import Checked
from mlc_amd.compiler.tuning.local import Local
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.measure.candidate import read
from mlc_amd.runtime.measure.measurer import Measurer
from mlc_amd.schedules.gpu.linear import gemv_plan
from mlc_amd.schedules.operators import Operator, from_json
from mlc_amd.schedules.space import space

CPU = "x86-64-v2"  # of what every machine that runs tests can run


def linear(
    kind: str, n: int = 64, k: int = 256, m: int = 1, fmt: str = "q4_0", bias: bool = False, arch: str | None = None
) -> Operator:
    layout = target(kind, arch or {"cpu": CPU, "vulkan": "lavapipe", "rocm": "gfx1100"}[kind]).act_layout(m, "int8")
    return operator(
        "linear", {"segments": [[fmt, n]], "k": k, "m": m, "layout": layout, "biases": [bias], "residual": False}
    )


def norm(eps: float, k: int = 256) -> Operator:
    return operator(
        "rms_norm", {"k": k, "m": 4, "eps": eps, "layout": target("cpu", CPU).act_layout(4, "int8"), "rows": "all"}
    )


HEADS = {"heads": 4, "kv_heads": 2, "d": 64, "ctx": 1024}
ROPE = {"neox": True, "rotary": 64, "eps": 1e-6}
# operator: (arguments, roles of its parameters on the GPU, state)
OPERATORS = {
    "linear": (
        {"segments": [["q6_k", 40]], "k": 256, "m": 1, "layout": "rows", "biases": [True], "residual": True},
        "state input input weight weight weight weight weight input output", [0, 1, 0, 0],
    ),
    "gate_up": (
        {"gate": "q4_0", "up": "q8_0", "n": 64, "k": 256, "m": 1, "layout_in": "rows", "layout": "rows"},
        "state input input weight weight weight weight output output", [0, 1, 0, 0],
    ),
    "rms_norm": (
        {"k": 256, "m": 16, "eps": 1e-5, "layout": "rows", "rows": "all"},
        "state input weight output output", [0, 16, 0, 0],
    ),
    "quantize": ({"k": 256, "m": 1, "layout": "rows"}, "state input output output", [0, 1, 0, 0]),
    "embed": ({"fmt": "q4_0", "vocab": 100, "k": 256, "m": 16}, "state input weight weight output", [0, 16, 0, 0]),
    "rope_kv_write": (
        HEADS | {"m": 16} | ROPE,
        "state rows pages input input input weight weight weight cache cache output",
        [512, 16, 0, 0],
    ),
    "attention": (
        HEADS | {"m": 16, "single": 0, "layout": "rows"}, "state rows pages input cache cache output output",
        [0, 16, 0, 0],
    ),
    "rope_attention": (
        HEADS | ROPE | {"layout": "rows"},
        "state rows pages input input input weight weight weight cache cache work zero output output",
        [512, 1, 1, 0],
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def llvmpipe():
    """A session on Mesa's CPU driver."""
    gpu("llvmpipe")
    with Measurer("llvmpipe") as session:
        yield session


@pytest.mark.parametrize("op", sample(OPERATORS, ["linear", "gate_up", "embed", "rope_attention"]))
def test_every_operator_becomes_a_candidate(llvmpipe, tmp_path, op):
    args, roles, state = OPERATORS[op]
    one = build(operator(op, args), None, "vulkan", "lavapipe", tmp_path / op)
    assert [p.role for p in one.params] == roles.split()
    assert one.cases[0]["state"] == state and one.cases[0]["bytes"] > 0
    assert all("draw" in p.facts for p in one.params if p.role == "weight" and p.name[:2] in ("W0", "G_", "U_", "Q4"))
    assert llvmpipe.compare(one.folder, one.folder)["passed"]
    if op == "linear":  # timing takes long; test_measure_devices.py has more of it
        [result] = llvmpipe.measure([one.folder])
        assert result["error"] is None and result["us"] > 0


def test_what_a_kernel_must_move(tmp_path):
    one = build(linear("vulkan"), None, "vulkan", "lavapipe", tmp_path / "a")
    weights, activations, result = 64 * 256 // 2 + 64 * 8 * 2, 256 + 8 * 4 * 4, 64 * 4
    assert one.facts["bytes"] == weights + activations + result and one.facts["flops"] == 2 * 64 * 256
    args = HEADS | ROPE | {"layout": "rows"}
    decode = build(operator("rope_attention", args | {"ctx": 8192}), None, "vulkan", "lavapipe", tmp_path / "b")
    assert [case["state"][0] for case in decode.cases] == [512, 4096, 8191]
    cache = 2 * 2 * 64 * 2 * np.array([513, 4097, 8192])
    assert [case["bytes"] for case in decode.cases] == pytest.approx(list(cache), rel=0.1)
    assert decode.facts["bytes"] == np.mean([case["bytes"] for case in decode.cases])
    short = build(operator("rope_attention", args), None, "vulkan", "lavapipe", tmp_path / "c")
    assert [case["state"][0] for case in short.cases] == [512, 1023]


def test_builds_are_repeatable_and_know_their_plan(tmp_path):
    plan = gemv_plan.Plan(rows=2, waves=1, lanes=8, unroll=1)
    first, second = (build(linear("vulkan"), plan, "vulkan", "lavapipe", tmp_path / name) for name in "ab")
    assert first.code.read_bytes() == second.code.read_bytes() and first.facts == second.facts
    assert plan_of(first.facts) == plan and from_json(first.facts["workload"]) == linear("vulkan")
    assert (
        folder_name(linear("vulkan"), plan)
        != folder_name(linear("vulkan"), None)
        != folder_name(linear("vulkan", 32), None)
    )


def test_workers_survive_what_does_not_build(tmp_path):
    good, refused = linear("cpu"), linear("cpu", k=257)
    wrong = replace(good, biases=())
    with Builder("cpu", CPU, tmp_path, workers=1) as builder:
        steps = []
        built = builder.build([(good, None), (refused, None), (wrong, None), (good, None)], lambda *s: steps.append(s))
        assert [isinstance(made, Path) for made in built] == [True, False, False, True]
        assert "UserError" in built[1] and "ValueError" in built[2]
        assert steps == [(i, 4) for i in range(1, 5)]
        builder.timeout = 0.05
        assert "took more than" in builder.build([(linear("cpu", 32), None)])[0]
        builder.timeout = 600.0
        assert isinstance(builder.build([(linear("cpu", 32), None)])[0], Path)
    assert read(built[0]).api == "cpu"
    with Builder("cpu", CPU, tmp_path, workers=1, memory=64 << 20) as builder:
        assert isinstance(builder.build([(good, None)])[0], str)


def test_tiles_that_do_not_suit_the_work_are_refused(tmp_path):
    workload, few = linear("rocm", 256, 256, 128), linear("rocm", 256, 256, 64)
    plan = next(plan for plan in space(workload, target("rocm", "gfx1100").archs[0]).plans if plan.tokens == 128)
    with pytest.raises(ValueError, match="does not divide into"):
        build(few, replace(plan, rows=24), "rocm", "gfx1100", tmp_path / "a")
    assert not (tmp_path / "a" / "candidate.json").exists()
    assert build(workload, plan, "rocm", "gfx1100", tmp_path / "b").steps[0]["grid"][0] == 1


# ---- verification


def disguised(folder, as_one) -> None:
    """A candidate that says that it is another one."""
    facts = read(folder).facts | {key: read(as_one).facts[key] for key in ("workload",)}
    (folder / "candidate.json").write_text(json.dumps(facts))


def test_another_kernel_is_rejected(tmp_path):
    right, wrong = (build(norm(eps), None, "cpu", CPU, tmp_path / str(eps)) for eps in (1e-5, 0.5))
    disguised(wrong.folder, right.folder)
    with Measurer() as measurer:
        found = Checked(**measurer.compare(right.folder, wrong.folder))
        assert (found.checked, found.passed) == ("device", False)
        assert "A: scales differ" in found.error and found.deviation > 1
        found = Checked(**measurer.compare(right.folder, right.folder))
        assert (found.checked, found.passed, found.deviation, found.error) == ("device", True, 0.0, "")
        other = build(norm(1e-5, 512), None, "cpu", CPU, tmp_path / "other")
        assert "same parameters" in measurer.compare(right.folder, other.folder)["error"]


def test_states_have_dead_tokens_and_stay_in_the_context(tmp_path):
    one = build(
        operator("attention", HEADS | {"m": 16, "single": 0, "layout": "rows"}), None, "vulkan", "lavapipe", tmp_path
    )
    found = one.facts["states"]
    assert [37, 13, 0, 0] in found and [0, 16, 0, 0] in found
    assert all(position + live <= 1024 for position, live, *_ in found)


def test_without_a_device_nothing_is_verified(tmp_path, monkeypatch):
    def nothing(*_):
        raise UserError("there is no GPU here")

    workload, plan = linear("rocm"), gemv_plan.Plan(rows=2, waves=1, lanes=4, unroll=1)
    with Local("rocm", "gfx1100", workers=1) as local:
        monkeypatch.setattr(local.measurer, "start", nothing)
        assert local.verify(workload, plan) == Checked("", False, error="there is no GPU here")


# ---- all of it


def test_local_measures_and_checks_on_the_cpu(tmp_path):
    workload = linear("cpu", 512, 512)
    plans = space(workload, target("cpu", CPU).archs[0]).plans[:3]
    seen = []
    with Local("cpu", CPU, workers=1) as local:
        measured = local.measure(
            [(workload, plan) for plan in plans] + [(linear("cpu", k=257), None)], lambda *s: seen.append(s)
        )
        assert all(
            m.error == "" and m.seconds > 0 and len(m.runs) >= 3 and m.runner == "local" and m.device
            for m in measured[:-1]
        )
        assert measured[-1].seconds is None and "UserError" in measured[-1].error
        assert seen[-1] == (len(plans) + 1, len(plans) + 1)
        checked = local.verify(workload, plans[-1])
        assert (checked.checked, checked.passed) == ("device", True), checked
        left = [folder for folder in os.listdir(local.root) if not folder.endswith("untuned")]
        assert left == []  # thousands would fill the disk
    assert not local.root.exists()


def test_the_default_plan_is_built_and_measured_once(tmp_path):
    """As the untuned kernel, which the others are timed beside."""
    workload, other = linear("cpu", 512, 512), linear("cpu", 256, 512)
    default, plan = space(workload, target("cpu", CPU).archs[0]).plans[:2]
    seen, timed = [], []
    with Local("cpu", CPU, workers=1, root=tmp_path) as local:
        measure = local.measurer.measure
        local.measurer.measure = lambda folders, note: timed.extend(folders := list(folders)) or measure(folders, note)
        jobs = [(workload, default), (workload, plan), (other, default)]
        measured = local.measure(jobs, lambda *s: seen.append(s))
        assert all(m.error == "" and m.seconds > 0 for m in measured) and seen[-1] == (3, 3)
        names = [folder_name(workload, None), folder_name(other, None), folder_name(workload, plan)]
        assert sorted(os.listdir(tmp_path)) == sorted(names) and [os.path.basename(folder) for folder in timed] == names
        [again] = local.measure([(workload, default)])  # alone, and from the kernel that is there
        assert again.seconds > 0 and len(timed) == 4
        assert local.verify(workload, plan).passed and len(os.listdir(tmp_path)) == 3


def test_kernels_are_made_with_their_plan():
    plan = gemv_plan.Plan(rows=4, waves=1, lanes=8, unroll=1)
    one, other = (make(linear("vulkan"), p, "vulkan", "lavapipe") for p in (plan, None))
    assert one.script() != other.script()
