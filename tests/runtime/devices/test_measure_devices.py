"""Measuring on devices: what happens when candidates crash; the CPU, Mesa's CPU driver and a stand-in for HIP."""

import json
import os
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from candidates import STATE, made
from samples import sample
from vulkan_harness import gpu
from workloads import operator

from mlc_amd.compiler.codegen.cpu import NATIVE, compile_c
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.measure import inputs, measurer, timing
from mlc_amd.runtime.measure.candidate import FILE, read
from mlc_amd.runtime.measure.child import Child, ChildDied
from mlc_amd.runtime.measure.hip import HipBackend
from mlc_amd.runtime.measure.measurer import Measurer
from mlc_amd.runtime.measure.timing import Bench
from tests.dev.hip_recorder import Recorder
from tests.dev.hip_types import OK


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    monkeypatch.setattr(timing, "BUSY", 0.0)


# ---- processes

CHILD = """
import os, sys, time
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.measure.child import serve

def handle(request, answer):
    print("chatter of a library")
    do = request["do"]
    if do == "crash":
        os.abort()
    if do == "fail":
        raise ValueError("what went wrong")
    if do == "refuse":
        raise UserError("do this instead")
    if do == "hang":
        time.sleep(100)
    answer({"did": do, "process": os.getpid()})

serve(handle)
"""


@pytest.fixture
def child(tmp_path, monkeypatch):
    (tmp_path / "measured_child.py").write_text(CHILD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    one = Child("measured_child")
    yield one
    one.close()


def test_children_die_and_come_back(child):
    child.send({"do": "a"})
    first = child.receive(20)
    assert first["did"] == "a"
    for do, why in (
        ("crash", "SIGABRT"),
        ("fail", "ended with code 1: ValueError: what went wrong"),
        ("hang", "took more than 1 s"),
    ):
        child.send({"do": do})
        with pytest.raises(ChildDied, match=why):
            child.receive(1 if do == "hang" else 20)
        child.send({"do": "b"})
        again = child.receive(20)
        assert again["did"] == "b" and again["process"] != first["process"]
    child.send({"do": "refuse"})
    with pytest.raises(UserError, match="do this instead"):
        child.receive(20)
    child.send({"do": "c"})
    assert child.receive(20)["process"] == again["process"]  # a refusal is no death


def test_children_end_with_their_parent(tmp_path):
    (tmp_path / "measured_child.py").write_text(CHILD)
    parent = textwrap.dedent("""
        from mlc_amd.runtime.measure.child import Child
        import os
        child = Child("measured_child")
        child.send({"do": "a"}); print(child.receive(20)["process"], flush=True)
        child.send({"do": "hang"}); os._exit(0)
    """)
    ran = subprocess.run(
        [sys.executable, "-c", parent], env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, timeout=300
    )
    process = int(ran.stdout)
    for _ in range(1200):
        try:
            status = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return
        if status == "Z":
            return
        time.sleep(0.1)
    raise AssertionError("the child outlived its parent")


# ---- the CPU

SOURCE = """
#include <stdint.h>
#include <stdlib.h>
#include <unistd.h>
typedef struct {{ int32_t type; uint32_t small; void *value; }} Any;
typedef struct {{
    void *data; int32_t device[2]; int32_t ndim; int32_t dtype; int64_t *shape, *strides; uint64_t offset;
}} Tensor;
static float *at(const Any *a) {{
    Tensor *t = a->type == 7 ? (Tensor *)a->value : (Tensor *)((char *)a->value + 24);
    return (float *)((char *)t->data + t->offset);
}}
int __tvm_ffi_kernel(void *self, const Any *args, int32_t count, Any *result) {{
    float *x = at(args + 1), *w = at(args + 2), *y = at(args + 3);
    {body}
    return 0;
}}
"""
BODIES = {
    "right": "for (int i = 0; i < 256; i++) y[i] = x[i] + w[i];",
    "slow": "for (volatile int r = 0; r < 3000; r++) ; for (int i = 0; i < 256; i++) y[i] = w[i] + x[i];",
    "wrong": "for (int i = 0; i < 256; i++) y[i] = x[i] - w[i];",
    "racy": "static int calls; for (int i = 0; i < 256; i++) y[i] = x[i] + w[i]; if (++calls % 3 == 0) y[7] += 1;",
    "careless": "for (int i = 0; i < 256; i++) { y[i] = x[i] + w[i]; x[i] = 0; }",
    "crash": "abort();",
    "hang": "for (;;) pause();",
}
AT_LOAD = "__attribute__((constructor)) static void start(void) { abort(); }"


@pytest.fixture
def kernels(tmp_path):
    """Name -> folder of candidates whose kernels are C."""
    folders = {}
    for name, body in (BODIES | {"load": ""}).items():
        made(tmp_path / name, None, code="kernel.so")
        source = tmp_path / name / "kernel.c"
        source.write_text(SOURCE.format(body=body) + (AT_LOAD if name == "load" else ""))
        compile_c(
            "-O1", "-shared", "-fPIC", "-pthread", "-o", str(tmp_path / name / "kernel.so"), str(source), str(NATIVE)
        )
        folders[name] = tmp_path / name
    return folders


def test_measures_on_the_cpu_and_survives_what_kernels_do(kernels, monkeypatch):
    seen = []
    with monkeypatch.context() as hasty, Measurer("1", timeout=1.0) as session:
        hasty.setattr(measurer, "LOAD", 0.0)  # and no limit that others could meet on a slow machine
        (hang,) = session.measure([kernels["hang"]])
        assert "took more than" in hang["error"]
    with Measurer("1", timeout=300.0) as session:
        names = ["right", "crash", "slow"]
        right, crash, slow = session.measure(
            [kernels[name] for name in names], lambda folder, result: seen.append(folder)
        )
        assert session.facts["device"].endswith("1 threads")
        assert crash["error"].startswith("ended by SIGABRT")
        assert right["error"] is None and slow["error"] is None and right["seconds"] * 1.5 < slow["seconds"]
        assert right["gbps"] == pytest.approx(3072 / right["seconds"] / 1e9)
        assert {str(kernels[name]) for name in names} == set(seen)
        slow = session.compare(kernels["right"], kernels["slow"])
        assert (slow["checked"], slow["passed"], slow["deviation"], slow["error"]) == ("device", True, 0.0, "")
        assert slow["gain"] < 0.9 and session.compare(kernels["slow"], kernels["right"])["gain"] > 1.1
        found = session.compare(kernels["right"], kernels["wrong"])
        assert found["deviation"] > 1 and "Y differs" in found["error"] and found["gain"] is None
        found = session.compare(kernels["right"], kernels["crash"])
        assert not found["passed"] and "SIGABRT" in found["error"]
        assert session.compare(kernels["right"], kernels["slow"])["passed"]


def test_kernels_that_are_right_now_and_then_are_wrong(kernels):
    later = [0, 4, 0, 0]

    def compared(session, name, *states):
        folder = kernels[name]
        facts = json.loads((folder / FILE).read_text())
        (folder / FILE).write_text(json.dumps(facts | {"states": states}))
        return session.compare(kernels["right"], folder)

    with Measurer("1") as session:
        found = compared(session, "racy", STATE, later)
        assert found["deviation"] > 1
        assert all(f"(state {state[:3]}, in 1 of 3 runs" in found["error"] for state in (STATE, later))
        # what spoils its inputs does so for its own next run only
        found = compared(session, "careless", later, later)
        assert found["error"].count("in 2 of 3 runs") == 2
        found = compared(session, "right", STATE, later)
        assert (found["deviation"], found["error"]) == (0.0, "")


def test_the_cpu_knows_when_others_have_it():
    from mlc_amd.runtime.measure.cpu import _waited

    core = sorted(os.sched_getaffinity(0))[0]
    spin = f"import os\nos.sched_setaffinity(0, {{{core}}})\nprint(flush=True)\nwhile True: pass"

    def share(crowd: int) -> float:
        """Of the time in which this thread waits while that many others want its core."""
        others = [subprocess.Popen([sys.executable, "-c", spin], stdout=subprocess.PIPE) for _ in range(crowd)]
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(threading.get_native_id(), {core})
        try:
            for other in others:
                other.stdout.readline()  # it spins
            waited, start = _waited(), time.perf_counter()
            while time.perf_counter() - start < 0.5:
                pass
            return (_waited() - waited) / (time.perf_counter() - start)
        finally:
            os.sched_setaffinity(threading.get_native_id(), before)
            for other in others:
                other.kill()
                other.communicate()

    # other tests' processes come and go: sooner or later there are no more of them beside the crowd than before it
    assert any(0.5 < share(3) > share(0) for _ in range(20))


def test_what_crashes_while_all_load_is_found(kernels):
    with Measurer("1") as session:
        right, load, slow = session.measure([kernels[name] for name in ("right", "load", "slow")])
    assert "SIGABRT" in load["error"] and right["error"] is None and slow["error"] is None


def test_without_the_device_it_says_so(tmp_path):
    one = made(tmp_path, needs={"flags": ["no_such_flag"]})
    with pytest.raises(UserError, match="lacks no_such_flag"):
        Measurer().measure([one.folder])
    with pytest.raises(UserError, match="cannot measure kernels of target 'abacus'"):
        Measurer().measure([made(tmp_path, api="abacus").folder])


# ---- HIP


def test_hip_times_graphs_and_reads_results(tmp_path):
    def add(_, state, x, w, y):
        count = 4 * 64 * 4
        y[:count].view(np.float32)[:] = x[:count].view(np.float32) + w[:count].view(np.float32)

    class Events(Recorder):
        def hipEventElapsedTime(self, begin, end):
            assert begin.come == begin.asked and end.come == end.asked
            return *OK, 0.5 * len(self.launched)

    recorder = Events({"kernel": (4, add)})
    steps = [{"symbol": "kernel", "args": [0, 1, 2, 3], "grid": [4, 1, 1], "block": [64, 1, 1]}]
    one = made(tmp_path, b"\x7fELF-gfx1100", api="rocm", arch="gfx1100", steps=steps)
    backend = HipBackend(None, one, recorder)
    backend.cache = 1 << 14
    group = Bench(backend, [one])
    assert group.copies == 16 and not group.failures
    assert backend.run([group.call(0, copy) for copy in range(3)]) == pytest.approx(1.5e-3)
    assert len(recorder.launched) == 3 and recorder.calls.count("hipGraphLaunch") == 1
    for _ in range(2):
        backend.run([group.call(0, copy) for copy in range(3)])
    assert recorder.calls.count("hipGraphInstantiate") == 1 and len(recorder.launched) == 9  # captured once
    backend.run([group.call(0, copy) for copy in (3, 4, 5)])
    assert recorder.calls.count("hipGraphInstantiate") == 2
    expected = inputs.fill(one, STATE)
    np.testing.assert_array_equal(group.outputs(0, STATE)["Y"], expected["X"] + expected["G"])
    backend.close()
    assert recorder.leaks() == []
    with pytest.raises(UserError, match="compiled for gfx942, but this machine has gfx1100"):
        HipBackend(None, made(tmp_path, api="rocm", arch="gfx942"), Events({}))


# ---- Vulkan


@pytest.mark.parametrize("biases", sample([0, 9], [9]))
def test_measures_on_a_vulkan_device(tmp_path, biases):
    """biases: with many, the arguments' addresses go to a table."""
    gpu("llvmpipe")
    from mlc_amd.compiler.tuning.build import build

    count = max(biases, 1)
    args = {
        "segments": [["q4_0", 64]] * count,
        "k": 256,
        "m": 1,
        "layout": "rows",
        "biases": [biases > 0] * count,
        "residual": False,
    }
    workload = operator("linear", args)
    one, two = (build(workload, None, "vulkan", "lavapipe", tmp_path / name) for name in "ab")
    assert one.steps[0]["table"] == (biases > 0)
    broken = tmp_path / "broken"
    shutil.copytree(two.folder, broken)
    read(broken).code.write_bytes(bytes(two.code.stat().st_size))
    with Measurer("llvmpipe") as session:
        results = session.measure([one.folder, broken, two.folder])
        assert results[0]["error"] is None and 0 < results[0]["seconds"] < 1 and results[2]["error"] is None
        assert results[1]["error"]
        assert session.facts["device"].startswith("llvmpipe")
        found = session.compare(one.folder, two.folder)
        assert (found["checked"], found["passed"], found["deviation"]) == ("lavapipe", True, 0.0)
