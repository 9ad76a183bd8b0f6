"""Tuned plans in a compiled model, and the tasks that a model's kernels make."""

import json
import random
from dataclasses import asdict, replace

import pytest
from few_functions import few_functions

from mlc_amd.compiler.codegen.target import make_target
from mlc_amd.compiler.gguf import GGUFModel, synthetic, write_gguf
from mlc_amd.compiler.lowering import lower
from mlc_amd.compiler.pipeline import compile_model, divided
from mlc_amd.compiler.tuning import database as databases
from mlc_amd.compiler.tuning import tasks as tuning
from mlc_amd.compiler.tuning.database import Checked, Database, Measured
from mlc_amd.compiler.tuning.rooflines import roofline
from mlc_amd.compiler.tuning.session import TuningSession
from mlc_amd.runtime.options import CompileOptions
from mlc_amd.schedules.space import space

pytest.importorskip("xgboost")
CONTEXT = 128


@pytest.fixture(scope="module")
def gguf(tmp_path_factory):
    """A small model's file."""
    path = tmp_path_factory.mktemp("tuning") / "tiny.gguf"
    with synthetic("tiny:q4_0") as model:
        write_gguf(model, path)
    return path


@pytest.fixture(scope="module")
def tasks(gguf):
    """The model's, for the Steam Deck."""
    backend = make_target("vulkan", "vangogh")
    with GGUFModel.open(gguf) as model:
        return backend, tuning.extract(model, backend, CONTEXT)


def test_tasks_are_the_distinct_kernels_weighted_by_their_calls(tasks, gguf):
    _, found = tasks
    with GGUFModel.open(gguf) as model:
        layers = len(model.config.layers)
    assert len({task.workload for task in found}) == len(found) > 15
    named = {task.name: task for task in found}
    decode = [task for task in found if "decode" in task.calls]
    assert sum(task.calls["decode"] for task in decode if task.workload.name == "rope_attention") == layers
    attention = named["attention_m64"]
    assert attention.calls == {"prefill_64": layers * 512 / 64} and "score_64" not in attention.calls
    gate_up = [task for task in decode if task.workload.name == "gate_up"]
    assert sum(task.calls["decode"] for task in gate_up) == layers
    for task in gate_up:
        args = task.workload.args
        assert task.weight == task.calls["decode"] * tuning.ANSWER
        assert task.flops == 4 * args["n"] * args["k"]
        assert 0.5 < task.bytes / (args["n"] * args["k"]) < 2.5  # two weights of 2 to 8 bits
    assert roofline(1e9)(gate_up[0]) == gate_up[0].bytes / 1e9
    assert roofline(0, 1e9, 1e8)(gate_up[0]) == gate_up[0].flops / 1e9
    assert roofline(0, 1e9, 1e8)(attention) == attention.flops / 1e8


def compiled(gguf, folder, **options):
    with GGUFModel.open(gguf) as model, few_functions():
        made = CompileOptions(target="vulkan", arch="vangogh", ctx=CONTEXT, **options)
        summary = compile_model(model, folder, made, weights=False)
    return summary, json.loads((folder / "manifest.json").read_text())


def test_compile_uses_a_tuned_plan_and_says_so(tasks, gguf, tmp_path, monkeypatch):
    backend, found = tasks
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    task = next(t for t in found if t.workload.name == "linear" and t.workload.args["m"] == 1)
    choices = space(task.workload, backend.archs[0])
    default = choices.default
    plan = next(p for p in choices.plans if p.waves != default.waves and p.waves > 1)
    with Database(backend.archs[0]) as database:
        session = TuningSession([task], backend.archs[0], database)
        session.report(task, default, Measured(2.0))
        session.report(task, plan, Measured(1.0))
        session.check(task, plan, Checked("emulator", True, 0.0))
    tuned, manifest = compiled(gguf, tmp_path / "tuned")
    kernels = {entry["name"]: entry["tuned"]["vangogh"] for entry in manifest["kernels"]}
    assert kernels.pop(task.name) == {"from": "user", "plan": asdict(plan)}
    assert {entry["from"] for entry in kernels.values()} == {"default"}
    assert tuned.tuned == {"user": 1, "default": len(kernels)} and tuned.notes == []
    plain, untuned = compiled(gguf, tmp_path / "untuned", tuned="none")
    assert plain.tuned == {"default": len(kernels) + 1}
    launch = [entry["launches"]["vangogh"][task.name]["steps"][0]["block"] for entry in (manifest, untuned)]
    assert launch[0] != launch[1] and launch[0][1] == plan.waves


def test_a_stale_record_leaves_a_note(tasks, gguf, tmp_path, monkeypatch):
    backend, found = tasks
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    task = next(t for t in found if t.workload.name == "linear" and t.workload.args["m"] == 1)
    folder = databases.folder_of(backend.archs[0])
    line = json.loads(task.workload.text) | {
        "version": 1,
        "tvm": "0.0",
        "plan": {"rows": 1},
        "seconds": 1.0,
        "passed": True,
    }
    folder.mkdir(parents=True)
    (folder / databases.LOG).write_text(json.dumps(line) + "\n")
    lookup = databases.Lookup(backend.archs[0])
    assert lookup.find(task.workload) == (None, "default")
    (note,) = lookup.notes
    assert note.startswith("user records for vangogh: 1 records ignored: made with TVM 0.0")


def test_every_arch_of_an_artifact_has_its_own_plans(gguf):
    backend = make_target("vulkan", "vangogh,rdna2")
    with GGUFModel.open(gguf) as model:
        lower(model, backend, CONTEXT)
    name, workload = next((n, w) for n, w in backend.workloads.items() if w.name == "linear" and w.args["m"] == 1)
    plan = replace(space(workload, backend.archs[1]).default, waves=1)
    backend.plans["rdna2"] = lambda other: (plan, "user") if other == workload else (None, "default")
    assert backend.origins(name) == {
        "vangogh": {"from": "default", "plan": None},
        "rdna2": {"from": "user", "plan": asdict(plan)},
    }
    assert backend.plan(workload, backend.archs[1]) == (plan, "user")
    kernels = [backend.kernel(name, other) for other in backend.archs]
    assert str(kernels[0]) != str(kernels[1])


@pytest.mark.parametrize("arch", ["vulkan/vangogh", "vulkan/nvidia", "rocm/gfx1100", "rocm/gfx906"])
def test_plans_of_all_kernels_can_be_built(arch, gguf):
    kind, _, name = arch.partition("/")
    backend, source = make_target(kind, name), random.Random(5)
    with GGUFModel.open(gguf) as model:
        found = tuning.extract(model, backend, CONTEXT)
    planned = [task for task in found if space(task.workload, backend.archs[0])]
    assert {task.workload.name for task in found} - {task.workload.name for task in planned} == {"sample"}
    for task in source.sample(planned, 6):
        plans = space(task.workload, backend.archs[0]).plans
        for plan in source.sample(plans, 2):
            assert backend.build(task.workload, backend.archs[0], "k", plan).attrs["global_symbol"] == "k"


def test_products_that_exchange_their_results_are_tuned_as_their_kernels_take_plans():
    backend = make_target("vulkan", "nvidia")
    with synthetic("llama3-8b:q4_0") as model, few_functions(("decode",)):
        found = {task.name: task.workload for task in tuning.extract(divided(model, 2), backend, CONTEXT)}
    exchanging = {name for name, op in found.items() if op.name == "linear" and op.args.get("norm_out")}
    assert exchanging == {"linear_q4_0_4096x2048_m1", "linear_q4_0_4096x7168_m1"}
    for name in exchanging:
        (*_, plan) = space(found[name], backend.archs[0]).plans
        assert backend.build(found[name], backend.archs[0], "k", plan).attrs["global_symbol"] == "k"
