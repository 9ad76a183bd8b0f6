"""The kernels that measure a CPU's rooflines: they do the work that they stand for, no more and no less, and run beside
the real ones."""

import types

import pytest
import tvm
from samples import sample
from tvm import tirx
from workloads import operator

from mlc_amd.compiler.codegen.lower import walk
from mlc_amd.compiler.tuning import build, rooflines, summary
from mlc_amd.runtime.measure.measurer import Measurer
from mlc_amd.runtime.options import TargetOptions
from mlc_amd.schedules.cpu.base import bound
from mlc_amd.schedules.cpu.base.arch import resolve
from mlc_amd.schedules.cpu.linear.planes import plane_bytes

DOTS = {
    "znver4": ("vpdpbusd.512", 64),
    "alderlake": ("vpdpbusd.256", 32),
    "x86-64-v3": ("pmadd.ub.sw", 32),
}  # products of an instruction


def linear(m, *segments, k=512):
    rest = {"biases": [False] * len(segments), "residual": False}
    return operator("linear", {"segments": [list(s) for s in segments], "k": k, "m": m, "layout": "tiles", **rest})


def gate_up(m, fmt):
    return operator(
        "gate_up", {"gate": fmt, "up": fmt, "n": 512, "k": 512, "m": m, "layout_in": "tiles", "layout": "tiles"}
    )


def attention(m, single):
    args = {"heads": 8, "kv_heads": 2, "d": 64, "ctx": 256, "m": m, "single": single, "layout": "tiles"}
    return operator("attention", args)


EXPERTS = {"experts": 8, "used": 2}


def expert_gate_up(m, fmt):
    args = {"gate": fmt, "up": fmt, "n": 512, "k": 512, "m": m} | EXPERTS | {"tile": min(m, 16), "biases": False}
    args |= {"act": "silu", "layout_in": f"tiles:{min(m, 16)}", "layout": f"tiles:{min(m, 16)}", "shared": m == 1}
    return operator("expert_gate_up", args)


def expert_down(fmt):
    args = {"fmt": fmt, "n": 512, "k": 512, "m": 1} | EXPERTS | {"tile": 1, "bias": False, "weighted": True}
    return operator("expert_down", args | {"residual": False, "layout": "tiles:1"})


def executed(stmt, kind, counts) -> float:
    """The sum of counts(node) over the nodes of a kind, each as often as it is executed: times the extents of the loops
    around."""
    if isinstance(stmt, tirx.SeqStmt):
        return sum(executed(one, kind, counts) for one in stmt.seq)
    if isinstance(stmt, tirx.For):
        return int(tvm.sym.Analyzer().simplify(stmt.extent)) * executed(stmt.body, kind, counts)
    if hasattr(stmt, "body"):
        return executed(stmt.body, kind, counts)
    found = []
    walk(stmt, kind, lambda node: found.append(counts(node)))
    return sum(found)


def kernels(workload, arch, folder):
    untuned = build.build(workload, None, "cpu", arch, folder)
    return bound.bounds(untuned.params, workload, resolve(arch).isa, "kernel")


PRODUCTS = {
    "linear": linear(64, ("q4_0", 1024)), "segments": linear(64, ("q4_k", 1024), ("q6_k", 512)),
    "gate_up": gate_up(64, "q5_k"), "experts": expert_gate_up(64, "q4_0"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "arch"),
    sample(
        [(name, arch) for name in PRODUCTS for arch in DOTS],
        [("linear", "znver4"), ("segments", "x86-64-v3"), ("experts", "alderlake")],
    ),
)
def test_the_products_of_int8_weights_are_all_there(name, arch, tmp_path):
    workload, (instruction, products) = PRODUCTS[name], DOTS[arch]

    def dots(call):
        return products if instruction in str(call)[:80] else 0

    (func,) = kernels(workload, arch, tmp_path)["multiplies"]
    wanted = sum(n for _, n in workload.weights) * workload.k * workload.m * getattr(workload, "used", 1)
    assert executed(func.body, tvm.ir.Call, dots) == pytest.approx(wanted, rel=0.07), (
        "the rest of divisions is left out"
    )


@pytest.mark.parametrize(
    "workload",
    [
        linear(1, ("q4_k", 1536), ("q6_k", 1024)), linear(1, ("f16", 64), k=1030), gate_up(1, "q8_0"),
        expert_gate_up(1, "q4_k"),
    ],
    ids=lambda workload: workload.label,
)  # fmt: skip
def test_all_bytes_of_weights_are_read(workload, tmp_path):
    size = sum(plane_bytes(fmt, n, workload.k) for fmt, n in workload.weights) * getattr(workload, "used", 1)

    def bytes_of(load):
        # parameters are seen as lines; what is prefetched is no vector
        return bound.LINE if len(load.source.shape) == 2 and str(load.ty) == "int32x16" else 0

    for func in kernels(workload, "x86-64-v3", tmp_path)["reads"]:
        read = executed(func.body, tvm.ir.expr.TensorLoad, bytes_of)
        assert size * 0.98 <= read <= size + bound.CHUNK * len(func.params), (
            "tasks are whole, tails of less than a line are left out"
        )


WORKLOADS = (linear(1, ("q4_0", 256)), linear(4, ("bf16", 64), k=102), expert_gate_up(4, "q4_0"), attention(1, 1))
MORE_WORKLOADS = (
    linear(32, ("iq4_nl", 256)), linear(32, ("q2_k", 256)), gate_up(1, "q6_k"), expert_down("q8_0"),
    attention(32, 0), attention(32, 4),
)  # fmt: skip


@pytest.mark.parametrize(
    "workloads", [pytest.param(WORKLOADS, id="few"), pytest.param(MORE_WORKLOADS, id="more", marks=pytest.mark.full)]
)
def test_they_run_beside_the_kernels(workloads):
    name = "native"
    tasks, done = [types.SimpleNamespace(workload=workload) for workload in workloads], []
    shares = rooflines.measure(tasks, resolve(name), "1", lambda *count: done.append(count))
    assert list(shares) == [workload.key for workload in workloads] and all(share > 0 for share in shares.values())
    assert done[-1] == (len(tasks), len(tasks))


def test_all_are_timed_one_after_the_other(tmp_path):
    workload = linear(1, ("q8_0", 64))
    untuned, bounds = build.build_bounds(workload, "x86-64-v2", tmp_path)
    folders = [untuned.folder, *(one.folder for kind in bounds.values() for one in kind)]
    with Measurer("1") as session:
        seconds = session.interleaved(folders)
    assert len(seconds) == len(folders) == 1 + len(bound.AHEAD) + 1 and all(
        len(cases) == 1 and cases[0] > 0 for cases in seconds
    )


def test_a_report_takes_measured_rooflines(tmp_path, monkeypatch):
    from mlc_amd.compiler.tuning.database import Database, Measured
    from mlc_amd.compiler.tuning.session import TuningSession
    from mlc_amd.tools.commands import tune

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    subject = tune.Subject.of(None, "tiny:q8_0", TargetOptions(target="cpu", ctx=64), "1")
    with Database(subject.arch) as database:
        session = TuningSession(subject.tasks, subject.arch, database)
        task = session.tasks[0]
        session.report(task, session.space(task).default, Measured(100e-6, runner="local", device="a CPU"))
    monkeypatch.setattr(rooflines, "measure", lambda tasks, *rest: {one.workload.key: 0.8 for one in tasks})
    shares = subject.bounds()
    assert list(shares) == [task.workload.key], "only of what was measured"
    (row,) = [row for row in subject.rows(shares) if row.history]
    assert row.roofline == pytest.approx(80e-6) and "80% -> 80% of it" in summary.gain([row], rooflines=True)
    assert (
        tune.Subject.of(None, "tiny:q8_0", TargetOptions(target="vulkan", arch="vangogh", ctx=64), None).bounds() == {}
    )


@pytest.mark.full
def test_a_gpus_roofline_has_the_bandwidth_of_the_product_that_measured(tmp_path, monkeypatch):
    """An H100's, not that of the profile, which is an H200's."""
    from mlc_amd.compiler.tuning.database import Database, Measured
    from mlc_amd.compiler.tuning.session import TuningSession
    from mlc_amd.tools.commands import tune

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    subject = tune.Subject.of(None, "tiny:q8_0", TargetOptions(target="vulkan", arch="nvidia", ctx=64), None)
    with Database(subject.arch) as database:
        session = TuningSession(subject.tasks, subject.arch, database)
        task = max(session.tasks, key=lambda task: task.bytes / (task.flops or 1))
        session.report(
            task, session.space(task).default, Measured(100e-6, runner="local", device="NVIDIA H100 80GB HBM3 (nvidia)")
        )
    (row,) = [row for row in subject.rows() if row.history]
    assert row.roofline == pytest.approx(task.bytes / 3352e9)
