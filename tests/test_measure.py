"""The measuring program: inputs, comparison, timing and what happens when candidates crash; on the CPU, on Mesa's CPU
driver, and on a stand-in for HIP."""

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
from vulkan_harness import gpu

from mlc_amd.compiler.codegen.cpu import NATIVE, compile_c
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.measure import bench, candidate, compare, inputs
from mlc_amd.runtime.measure.bench import Bench
from mlc_amd.runtime.measure.child import Child, Died
from mlc_amd.runtime.measure.hip import HipBackend
from mlc_amd.runtime.measure.session import Session, best, measure
from mlc_amd.tools.dev.hip_recorder import OK, Recorder

STATE = [7, 3, 0, 0]
ADD = [  # y = x + w, which the tests' kernels compute
    {"name": "state", "shape": [4], "dtype": "int32", "role": "state"},
    {"name": "X", "shape": [4, 64], "dtype": "float32", "role": "input"},
    {"name": "G", "shape": [4, 64], "dtype": "float32", "role": "weight"},
    {"name": "Y", "shape": [4, 64], "dtype": "float32", "role": "output"},
]


def made(folder, content: bytes | None = b"", params=ADD, op="add", **facts):
    """A candidate in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    if content is not None:
        (folder / "kernel").write_bytes(content)
    case = {"name": "d0", "state": STATE, "bytes": 3072, "flops": 256}
    about = {
        "workload": {"op": op, "args": {}},
        "plan": None,
        "api": "cpu",
        "arch": "any",
        "needs": {"flags": []},
        "code": "kernel",
    }
    steps = [{"symbol": "kernel", "args": [0, 1, 2, 3]}]
    about |= {"steps": steps, "scratch": [], "params": params, "cases": [case], "bytes": 3072, "flops": 256}
    return candidate.write(folder, about | facts)


def test_gpus_are_measured_without_tvm():
    names = ", ".join(f"mlc_amd.runtime.measure.{name}" for name in ("program", "session", "vulkan", "hip", "compare"))
    check = (
        f"import sys, {names}; print([m for m in sys.modules if m.split('.')[0] in ('tvm', 'tvm_ffi') or "
        f"m.startswith('mlc_amd.c')])"
    )
    ran = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout == "[]\n"


# ---- candidates and inputs


def test_candidates_are_read_as_they_were_written(tmp_path):
    one = made(tmp_path / "one")
    again = candidate.read(tmp_path / "one")
    assert again.params == one.params and again.group == one.group and again.params[2].nbytes == 1024
    assert made(tmp_path / "other", arch="else").group != one.group
    private = [*ADD, {"name": "Parts", "shape": [9], "dtype": "float32", "role": "work"}]
    assert made(tmp_path / "larger", params=private).group == one.group  # plans decide on these
    with pytest.raises(UserError, match="holds no candidate"):
        candidate.read(tmp_path)
    (tmp_path / "candidate.json").write_text('{"format": 99}')
    with pytest.raises(UserError, match="another version"):
        candidate.read(tmp_path)


def test_figures():
    assert candidate.figures({"bytes": 2e9, "flops": 4e12}, 1e-3) == {"us": 1000.0, "gbps": 2000.0, "tflops": 4000.0}


PLANES = [
    ("W0_Q4", (64, 8, 4), "uint32", ["bits"]), ("W0_D", (64, 8), "float16", ["signs", 0.01]), ("W0_M", (64, 8),
    "float16", ["signs", 0.02]),
    ("W0_S", (64, 16), "int8", ["integers", -32, 64]), ("W1_W", (64, 100), "uint16", ["normal", 0.1]),
]  # fmt: skip


def test_inputs_are_the_same_everywhere_and_sane(tmp_path):
    params = [{"name": n, "shape": s, "dtype": t, "role": "weight", "draw": d} for n, s, t, d in PLANES]
    params += [{"name": "Kc", "shape": [2, 512, 64], "dtype": "float16", "role": "cache"}]
    params += [{"name": "tokens", "shape": [50], "dtype": "int32", "role": "input", "vocab": 9}]
    params += [{"name": "CS", "shape": [10, 8], "dtype": "float32", "role": "weight"}]
    one = made(tmp_path, params=params)
    arrays, again = (inputs.fill(one, STATE) for _ in range(2))
    for p in one.params:
        assert arrays[p.name].shape == p.shape and arrays[p.name].tobytes() == again[p.name].tobytes()
    d, m = arrays["W0_D"].astype(np.float32), arrays["W0_M"].astype(np.float32)
    np.testing.assert_allclose(m, 2 * d, rtol=2e-3)  # minimums go with their scales
    assert np.abs(d).min() > 0.005 and np.abs(d).max() < 0.02
    assert arrays["W0_S"].min() == -32 and arrays["W0_S"].max() == 31
    assert 0.9 < arrays["Kc"].astype(np.float32).std() < 1.1
    assert set(arrays["tokens"]) <= set(range(9))
    np.testing.assert_allclose(arrays["CS"][3, 2:4], [np.cos(0.3), np.sin(0.3)], rtol=1e-5)


def test_int8_activations_carry_their_own_sums():
    a, s = inputs.quantized((3, 4, 32), (3, 4, 4))
    d, q = s[..., 0], a.astype(np.int32)
    for field, part in ((1, q), (2, q[..., :16]), (3, q[..., 16:])):
        np.testing.assert_allclose(s[..., field], d * part.sum(-1), rtol=1e-6)
    assert np.abs(a).max() == 127
    a, s = inputs.quantized((2, 4, 16, 32), (2, 4, 8, 16))
    q = a.astype(np.int32).sum(-1)
    np.testing.assert_allclose(s[:, :, 1], s[:, :, 0] * q, rtol=1e-6)
    assert (np.ascontiguousarray(s[:, :, 2]).view(np.int32) == -q).all()


# ---- comparison


def outputs(*params):
    return [{"name": n, "shape": s, "dtype": t, "role": r} | f for n, s, t, r, f in params]


def test_comparison_of_floats(tmp_path):
    one = made(
        tmp_path,
        params=outputs(("Y0", [4, 48], "float32", "output", {"columns": 40}), ("Kc", [8, 8], "float16", "cache", {})),
    )
    rng = np.random.default_rng(0)
    expected = {
        "Y0": rng.standard_normal((4, 48)).astype(np.float32),
        "Kc": rng.standard_normal((8, 8)).astype(np.float16),
    }

    def wrong(name, where, value):
        found = {key: array.copy() for key, array in expected.items()}
        found[name][where] = value
        return compare.differences(one, STATE, expected, found)

    assert compare.differences(one, STATE, expected, expected) == (0.0, [])
    share, why = wrong("Y0", (1, 1), expected["Y0"][1, 1] + 1e-4)
    assert 0 < share < 1 and not why  # the order of additions
    assert wrong("Y0", (0, 41), 9.0) == (0.0, [])  # padding
    assert wrong("Y0", (3, 1), 9.0) == (0.0, [])  # beyond the three live tokens
    for name, where, value in (("Y0", (2, 3), 9.0), ("Y0", (2, 3), np.nan), ("Kc", (7, 7), 5.0)):
        share, why = wrong(name, where, value)
        assert share > 1 and name in why[0]
    found = expected | {"Y0": np.full((4, 48), inputs.SIGNATURE * 0x01010101, np.uint32).view(np.float32)}
    assert "not written" in compare.differences(one, STATE, found, found)[1][0]  # agreeing to do nothing does not count


@pytest.mark.parametrize("tiles", [False, True])
def test_comparison_of_int8_activations(tmp_path, tiles):
    shapes = ([1, 8, 16, 32], [1, 8, 8, 16]) if tiles else ([4, 8, 32], [4, 8, 4])
    one = made(
        tmp_path, params=outputs(("A", shapes[0], "int8", "output", {}), ("S", shapes[1], "float32", "output", {}))
    )
    a, s = inputs.quantized(*map(tuple, shapes))
    expected = {"A": a, "S": s}
    place, scale = ((0, 0, 0, 5), (0, 0, 0, 0)) if tiles else ((0, 0, 5), (0, 0, 0))
    assert compare.differences(one, STATE, expected, expected) == (0.0, [])

    def changed(array, where, by):
        new = array.copy()
        new[where] += by
        return new

    def why(**arrays):
        return compare.differences(one, STATE, expected, expected | arrays)[1][0]

    step = 2 if a[place] < 100 else -2
    assert "2 steps apart" in why(A=changed(a, place, step))
    assert "scales" in why(S=changed(s, scale, 0.01))
    assert "a step apart" in why(A=np.where(a < 0, a + 1, a - 1).astype(np.int8))
    second = (*scale[:2], 1, *scale[3:]) if tiles else (*scale[:2], 1)
    assert "sums" in why(S=changed(s, second, 1.0))


# ---- timing


class Clock:
    """A device whose time we make: `speed(call number)` slows everything down, kernels take what their `code` says."""

    name, facts, cache, target, disturbed = "clock", {}, 1 << 14, 1e-3, 0.0

    def __init__(self, speed=lambda runs: 1.0):
        self.speed, self.runs, self.bound, self.kept, self.sequence = speed, 0, [], {}, []

    def open(self, sizes):
        self.sizes = sizes

    def put(self, key, array):
        self.kept[key] = array.copy()

    def load(self, candidates):
        return [
            float(c.code.read_bytes()) if c.code.read_bytes() != b"bad" else ValueError("no such kernel")
            for c in candidates
        ]

    def bind(self, handle, candidate, keys):
        return handle, keys

    def run(self, calls):
        self.runs += 1
        self.sequence += [(seconds, keys) for seconds, keys in calls]
        return sum(seconds for seconds, _ in calls) * self.speed(self.runs)


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    monkeypatch.setattr(bench, "BUSY", 0.0)


def timed(tmp_path, clock, codes):
    results, doing = {}, []
    group = Bench(clock, [made(tmp_path / str(i), str(code).encode()) for i, code in enumerate(codes)])
    group.measure(doing.append, lambda i, result: results.__setitem__(i, result))
    return group, results, doing


def test_weights_rotate_over_more_than_the_cache_and_activations_stay(tmp_path):
    clock = Clock()
    group, results, _ = timed(tmp_path, clock, [1e-4])
    assert group.copies == (1 << 14) // 1024
    keys = [keys for _, keys in clock.sequence]
    assert [k[2][0] for k in keys[:40]] == [i % 16 for i in range(40)], (
        "each call takes the next copy, also in the next repetition"
    )
    assert {k[1] for k in keys} == {("shared", "X")}
    assert all(clock.kept[copy, "G"].tobytes() == clock.kept[0, "G"].tobytes() for copy in range(16))
    assert (
        results[0]["seconds"] == pytest.approx(1e-4)
        and results[0]["spread"] == pytest.approx(0)
        and len(results[0]["runs"]) == 7
    )


def test_medians_outliers_and_failures(tmp_path):
    clock = Clock(lambda runs: 3.0 if runs % 5 == 0 else 1.0)  # one of five repetitions is disturbed
    group, results, _ = timed(tmp_path, clock, [1e-4, 2e-4, "bad"])
    assert results[0]["seconds"] == pytest.approx(1e-4) and results[1]["seconds"] == pytest.approx(2e-4)
    assert results[1]["outliers"] >= 1 and len(results[1]["runs"]) > bench.REPEATS  # noticed, and repeated
    assert group.failures == {2: "no such kernel"}


def test_repetitions_that_other_programs_disturbed_do_not_count(tmp_path):
    class Shared(Clock):
        def run(self, calls):
            self.disturbed = 0.5 if self.runs % 3 else 0.0
            return super().run(calls) * (1 + self.disturbed)

    _, results, _ = timed(tmp_path, Shared(), [1e-4])
    assert (
        results[0]["seconds"] == pytest.approx(1e-4)
        and results[0]["disturbed"] == 0
        and results[0]["spread"] == pytest.approx(0)
    )


def test_candidates_timed_while_the_clocks_fell_are_timed_again(tmp_path):
    speed = {"now": 1.0}
    clock = Clock(lambda runs: speed["now"])
    group = Bench(clock, [made(tmp_path / str(i), b"1e-4") for i in range(4)])
    results, history = {}, []

    def doing(i):
        history.append(i)
        speed["now"] = 1.5 if 2 <= len(history) <= 5 else 1.0  # until the reference shows it

    group.measure(doing, lambda i, result: results.__setitem__(i, result))
    assert history == [0, 1, 2, 3, 0, 1, 2, 3, 0]
    assert all(result["seconds"] == pytest.approx(1e-4) and result["drift"] == 0 for result in results.values())


def test_drift_that_stays_is_marked(tmp_path):
    steps = iter(np.linspace(1, 40, 400))
    _, results, _ = timed(tmp_path, Clock(lambda runs: next(steps)), [1e-4, 1e-4])
    assert results[1]["drift"] > bench.DRIFT


def test_hopeless_candidates_get_fewer_repetitions(tmp_path):
    _, results, _ = timed(tmp_path, Clock(), [1e-5, 1e-3])
    assert len(results[1]["runs"]) == bench.FEWER


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
        ("hang", "took more than 2 s"),
    ):
        child.send({"do": do})
        with pytest.raises(Died, match=why):
            child.receive(2 if do == "hang" else 20)
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
        [sys.executable, "-c", parent], env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, timeout=60
    )
    process = int(ran.stdout)
    for _ in range(100):
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
    "hang": "for (;;) ;",
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


def test_measures_on_the_cpu_and_survives_what_kernels_do(kernels):
    seen = []
    with Session("1", timeout=3.0) as session:
        names = ["right", "crash", "slow", "hang"]
        right, crash, slow, hang = session.measure(
            [kernels[name] for name in names], lambda folder, result: seen.append(folder)
        )
        assert session.facts["device"].endswith("1 threads")
        assert crash["error"].startswith("ended by SIGABRT") and "took more than" in hang["error"]
        assert right["error"] is None and slow["error"] is None and right["seconds"] * 1.5 < slow["seconds"]
        assert right["gbps"] == pytest.approx(3072 / right["seconds"] / 1e9)
        assert best([right, crash, slow, hang]) == 0 and best([crash]) is None
        assert {str(kernels[name]) for name in names} == set(seen)
        slow = session.compare(kernels["right"], kernels["slow"], [STATE])
        assert slow["error"] == 0.0 and slow["wrong"] == [] and slow["gain"] < 0.9
        assert session.compare(kernels["slow"], kernels["right"], [STATE])["gain"] > 1.1
        found = session.compare(kernels["right"], kernels["wrong"], [STATE])
        assert found["error"] > 1 and "Y differs" in found["wrong"][0] and found["gain"] is None
        assert "SIGABRT" in session.compare(kernels["right"], kernels["crash"], [STATE])["wrong"][0]
        assert session.compare(kernels["right"], kernels["slow"], [STATE])["wrong"] == []


def test_kernels_that_are_right_now_and_then_are_wrong(kernels):
    later = [0, 4, 0, 0]
    with Session("1") as session:
        found = session.compare(kernels["right"], kernels["racy"], [STATE, later])
        assert found["error"] > 1 and len(found["wrong"]) == 2
        assert all(
            f"(state {state[:2]}, in 1 of 3 runs" in text
            for state, text in zip((STATE, later), found["wrong"], strict=True)
        )
        # what spoils its inputs does so for its own next run only
        found = session.compare(kernels["right"], kernels["careless"], [later, later])
        assert len(found["wrong"]) == 2 and all("in 2 of 3 runs" in text for text in found["wrong"])
        found = session.compare(kernels["right"], kernels["right"], [STATE, later])
        assert (found["error"], found["wrong"]) == (0.0, [])


def test_the_cpu_knows_when_others_have_it():
    from mlc_amd.runtime.measure.cpu import _waited

    core = sorted(os.sched_getaffinity(0))[0]
    spin = f"import os\nos.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    share = []
    for crowd in (0, 3):
        others = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(crowd)]
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(threading.get_native_id(), {core})
        try:
            time.sleep(0.5 if crowd else 0)
            waited, start = _waited(), time.perf_counter()
            while time.perf_counter() - start < 0.5:
                pass
            share.append((_waited() - waited) / (time.perf_counter() - start))
        finally:
            os.sched_setaffinity(threading.get_native_id(), before)
            for other in others:
                other.kill()
                other.wait()
    assert share[1] > 0.5 and share[1] > share[0]


def test_what_crashes_while_all_load_is_found(kernels):
    with Session("1") as session:
        right, load, slow = session.measure([kernels[name] for name in ("right", "load", "slow")])
    assert "SIGABRT" in load["error"] and right["error"] is None and slow["error"] is None


def test_without_the_device_it_says_so(tmp_path):
    one = made(tmp_path, needs={"flags": ["no_such_flag"]})
    with pytest.raises(UserError, match="lacks no_such_flag"):
        measure([one.folder])
    with pytest.raises(UserError, match="cannot measure kernels of target 'abacus'"):
        measure([made(tmp_path, api="abacus").folder])


# ---- HIP


def test_hip_times_graphs_and_reads_results(tmp_path):
    def add(state, x, w, y):
        count = 4 * 64 * 4
        y[:count].view(np.float32)[:] = x[:count].view(np.float32) + w[:count].view(np.float32)

    class Events(Recorder):
        def hipEventElapsedTime(self, begin, end):
            assert not begin.pending and not end.pending
            return *OK, 0.5 * len(self.launched)

    recorder = Events({"kernel": (4, add)})
    steps = [{"symbol": "kernel", "args": [0, 1, 2, 3], "grid": [4, 1, 1], "block": [64, 1, 1]}]
    one = made(tmp_path, b"\x7fELF-gfx1100", api="rocm", arch="gfx1100", steps=steps)
    backend = HipBackend(None, one, recorder)
    backend.cache = 1 << 14
    group = Bench(backend, [one])
    assert group.copies == 16 and not group.failures
    assert backend.run([group._call(0, copy) for copy in range(3)]) == pytest.approx(1.5e-3)
    assert len(recorder.launched) == 3 and recorder.calls.count("hipGraphLaunch") == 1
    for _ in range(2):
        backend.run([group._call(0, copy) for copy in range(3)])
    assert recorder.calls.count("hipGraphInstantiate") == 1 and len(recorder.launched) == 9  # captured once
    backend.run([group._call(0, copy) for copy in (3, 4, 5)])
    assert recorder.calls.count("hipGraphInstantiate") == 2
    expected = inputs.fill(one, STATE)
    np.testing.assert_array_equal(group.outputs(0, STATE)["Y"], expected["X"] + expected["G"])
    backend.close()
    assert recorder.leaks() == []
    with pytest.raises(UserError, match="these kernels are for gfx942; this machine has gfx1100"):
        HipBackend(None, made(tmp_path, api="rocm", arch="gfx942"), Events({}))


# ---- Vulkan


@pytest.mark.parametrize("biases", [0, 9])
def test_measures_on_a_vulkan_device(tmp_path, biases):
    """biases: with many, the arguments' addresses go to a table."""
    gpu("llvmpipe")
    from mlc_amd.compiler.tuning.build import build
    from mlc_amd.schedules.tuning.workload import Workload

    count = max(biases, 1)
    args = {
        "segments": [["q4_0", 64]] * count,
        "k": 256,
        "m": 1,
        "act": "rows",
        "biases": [biases > 0] * count,
        "residual": False,
    }
    workload = Workload("linear", args)
    one, two = (build(workload, None, "vulkan", "lavapipe", tmp_path / name) for name in "ab")
    assert one.steps[0]["table"] == (biases > 0)
    broken = tmp_path / "broken"
    shutil.copytree(two.folder, broken)
    (broken / "kernel.spv").write_bytes(bytes(len((broken / "kernel.spv").read_bytes())))
    with Session("llvmpipe") as session:
        results = session.measure([one.folder, broken, two.folder])
        assert results[0]["error"] is None and 0 < results[0]["seconds"] < 1 and results[2]["error"] is None
        assert results[1]["error"]
        assert session.facts["device"].startswith("llvmpipe")
        found = session.compare(one.folder, two.folder, [[0, 1, 0, 0]])
        assert (found["error"], found["wrong"]) == (0.0, [])
