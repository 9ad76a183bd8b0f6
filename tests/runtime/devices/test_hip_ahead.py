"""Steps of the rocm device that start while another one is in progress, on a substitute for AMD's bindings that
computes nothing before a wait: copies at a wrong time are visible."""

import numpy as np
import pytest
from hip_model import CTX, KERNELS, PAGE, SLOT, SLOTS, VOCAB, artifact_in, check, write_pages
from samples import sample

from mlc_amd.runtime.devices import pieces
from mlc_amd.runtime.devices.hip import memory as hip_memory
from mlc_amd.runtime.devices.hip.device import HipDevice
from mlc_amd.runtime.devices.steps import write_step
from mlc_amd.runtime.errors import UserError
from tests.dev.hip_recorder import Recorder

STEPS = 7
FUNCTIONS = ("pick", "pick_4")


@pytest.fixture
def model(tmp_path):
    return artifact_in(tmp_path)("gfx1100")


@pytest.fixture(autouse=True)
def never_too_long(monkeypatch):
    """Steps are not divided into pieces, however busy this machine is."""
    monkeypatch.setattr(pieces, "LIMIT", float("inf"))


@pytest.fixture(params=[True, False], ids=["graphs", "launches"])
def graphs(request, monkeypatch):
    if not request.param:
        monkeypatch.setenv("MLC_AMD_GRAPH", "0")
    return request.param


class Steps:
    """Steps of one sequence, each of which takes the tokens that the one before chose. Their choice depends on the
    step's number; late: also on its tokens, so it is known late."""

    def __init__(self, device, name, late=False):
        self.device, self.name, self.late = device, name, late
        self.entry = device.manifest["functions"][name]
        self.rows = self.entry["rows"]

    def write(self, i, tokens=None):
        """tokens: None where the GPU has them."""
        write_pages(self.device, 0)
        tokens = [VOCAB - 1] * self.rows if tokens is None else tokens
        write_step(self.device, self.entry, [(t, i * self.rows + row, SLOT) for row, t in enumerate(tokens)])

    def choose(self, i, tokens):
        draw = np.random.default_rng([i, *(tokens if self.late else [])])
        self.device.write("allowed", draw.integers(0, 1 << 31, (self.rows, VOCAB // 32), np.int32))
        self.device.write("sampling", draw.integers(0, VOCAB, self.rows, np.int32))

    def spoil(self):
        """Overwrites the inputs, as the host may once a step is enqueued."""
        for name, shape in {"state": 4, "answers": 4, "tokens": 16, "rows": (16, 2), "sampling": 16}.items():
            self.device.write(name, np.ones(shape, np.int32))
        self.device.write("allowed", np.zeros((16, VOCAB // 32), np.int32))
        self.device.write("pages.0", np.zeros((SLOTS, CTX // PAGE), np.int32))

    def read(self):
        return self.device.read("sampled", self.rows).tolist()

    def first(self):
        return list(range(3, 3 + self.rows))

    def one_by_one(self, run=None):
        tokens, found = self.first(), []
        for i in range(STEPS):
            self.write(i, tokens)
            self.choose(i, tokens)
            (run or self.device.run)(self.name)
            tokens = self.read()
            found.append(tokens)
        assert len({tuple(tokens) for tokens in found}) > STEPS // 2
        return found

    def start(self):
        self.write(0, self.first())
        if self.late:
            self.device.start(self.name, lambda: self.choose(0, self.first()))
        else:
            self.choose(0, self.first())
            self.device.start(self.name)

    def ahead(self, executed=lambda: None):
        """executed: called after each submission."""
        found = []
        assert self.device.can_start_ahead(self.name, self.late)
        self.start()
        for i in range(1, STEPS):
            executed()
            self.spoil()
            assert self.device.can_start_ahead(self.name, self.late)
            self.write(i)
            if not self.late:
                self.choose(i, [])
            self.device.start_ahead(self.name, self.late)
            self.spoil()
            executed()
            self.device.wait()
            found.append(self.read())
            if self.late:
                self.choose(i, found[-1])
                self.device.complete_inputs(self.name)
        self.device.wait()
        return [*found, self.read()]


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("eager", [False, True])
def test_steps_ahead_choose_what_steps_one_by_one_do(model, graphs, name, late, eager):
    """Whether the GPU computes at once or at a wait; the host overwrites inputs after a step is enqueued."""
    bindings = Recorder(KERNELS)
    device = HipDevice(model, bindings=bindings)
    steps = Steps(device, name, late)
    expected = steps.one_by_one(device.run_plain)
    assert device.waited > 0
    for _ in range(2):
        waited = device.waited
        assert steps.ahead(bindings._flush if eager else lambda: None) == expected
        assert device.waited > waited and not bindings.queue
    assert steps.one_by_one() == expected
    check(device)


def test_on_an_apu_in_host_memory(model):
    bindings = Recorder(KERNELS, gpus=[{"integrated": 1}], memory=8 << 10)
    device = HipDevice(model, bindings=bindings)
    assert device.memory.host_memory
    for late in (False, True):
        steps = Steps(device, "pick_4", late)
        assert steps.ahead() == steps.one_by_one()


def test_a_step_ahead_waits_for_nothing(model, graphs):
    """A copy of its inputs, one of its tokens, one of its results."""
    bindings = Recorder(KERNELS)
    device = HipDevice(model, bindings=bindings)
    launched = ["hipGraphLaunch"] if graphs else 5 * ["hipModuleLaunchKernel"]
    steps = Steps(device, "pick")
    steps.ahead()
    steps.start()
    bindings.calls.clear()
    device.start_ahead("pick")
    copy = ["hipMemcpyAsync"]
    assert bindings.calls == [*2 * ["hipSetDevice"], *copy, *copy, *launched, *copy, "hipEventRecord"]
    device.wait()
    assert len(bindings.queue) == len(launched) + 4
    device.wait()
    assert not bindings.queue and bindings.calls[-4:] == 2 * ["hipSetDevice", "hipEventSynchronize"]


def test_large_results_are_fetched_when_they_are_read(model, monkeypatch):
    monkeypatch.setattr(hip_memory, "SMALL", 100)
    bindings = Recorder(KERNELS)
    device = HipDevice(model, bindings=bindings)
    assert device.memory.result_bytes == 256
    steps = Steps(device, "pick_4")
    expected = steps.one_by_one(device.run_plain)
    logits = device.read("logits", 4).copy()
    bindings.calls.clear()
    assert steps.ahead(bindings._flush) == expected and "hipStreamSynchronize" not in bindings.calls
    assert np.array_equal(device.read("logits", 4), logits)
    assert bindings.calls[-2:] == ["hipMemcpyAsync", "hipStreamSynchronize"]
    check(device)


def test_the_pacer_records_the_duration_of_each_step(model, monkeypatch):
    device, recorded = HipDevice(model, bindings=Recorder(KERNELS)), []
    monkeypatch.setattr(device.pacer, "record", lambda name, spent, piece=(): recorded.append((name, spent > 0, piece)))
    Steps(device, "pick").ahead()
    assert recorded == STEPS * [("pick", True, ())]


# ---- steps that do not start ahead


def test_long_steps_do_not_begin_ahead(model):
    device = HipDevice(model, bindings=Recorder(KERNELS))
    steps = Steps(device, "pick", late=True)
    expected = steps.ahead()
    device.pacer.limit = 1e-9
    assert not device.can_start_ahead("pick") and not device.can_start_ahead("pick", True)
    assert steps.one_by_one() == expected
    device.pacer.limit = 10.0
    assert steps.ahead() == expected


def test_without_late_inputs_nothing_is_late(model):
    bindings = Recorder(KERNELS)
    device, called = HipDevice(model, bindings=bindings), []
    assert device.can_start_ahead("decode") and not device.can_start_ahead("decode", late=True)
    write_pages(device, 0)
    write_step(device, device.manifest["functions"]["decode"], [(1, 0, SLOT)])
    device.start("decode", lambda: called.append(len(bindings.queue)))
    assert called == [0]
    device.wait()


def test_nothing_is_captured_while_a_step_is_in_progress(model):
    """Launches before late inputs then go one by one."""
    bindings = Recorder(KERNELS)
    device = HipDevice(model, bindings=bindings)
    steps = Steps(device, "pick")
    steps.start()
    bindings.calls.clear()
    assert device.can_start_ahead("pick", late=True)
    steps.write(1)
    device.start_ahead("pick", late=True)
    device.wait()
    steps.choose(1, [])
    device.complete_inputs("pick")
    device.wait()
    assert steps.read() == steps.one_by_one()[1]
    assert "hipStreamBeginCapture" not in bindings.calls and bindings.calls.count("hipModuleLaunchKernel") == 5
    assert device.can_start_ahead("pick", late=True) and bindings.calls[-1] == "hipGraphInstantiate"


# ---- steps without a wait


def test_an_error_leaves_nothing_in_progress(model, graphs):
    bindings = Recorder(KERNELS)
    device = HipDevice(model, bindings=bindings)
    steps = Steps(device, "pick", late=True)

    def fails():
        assert bindings.queue
        raise ZeroDivisionError

    for begins in (device.start, device.run):
        steps.write(0, steps.first())
        with pytest.raises(ZeroDivisionError):
            begins("pick", fails)
        assert not bindings.queue and bindings.launched[-1][0] == "last_k"
    assert steps.ahead() == steps.one_by_one()


ABANDONED = [(late, ahead) for late in (False, True) for ahead in (False, True)]


@pytest.mark.parametrize(("late", "ahead"), sample(ABANDONED, ABANDONED[1:3]))
def test_steps_without_a_wait_do_no_harm(model, graphs, late, ahead):
    """late: the rest of the step is not even enqueued."""
    bindings = Recorder(KERNELS)
    device = HipDevice(model, bindings=bindings)
    steps = Steps(device, "pick_4", late)
    expected = steps.one_by_one()

    def abandon():
        steps.start()
        if ahead:
            steps.write(1)
            device.start_ahead("pick_4", late)
        steps.spoil()
        assert bindings.queue

    abandon()
    assert steps.ahead() == expected
    for run in (device.run, device.run_plain, device.time):
        abandon()
        assert steps.one_by_one(run) == expected
    abandon()
    device.pacer.limit = 1e-9
    assert steps.one_by_one() == expected
    device.pacer.limit = 10.0
    abandon()
    check(device)


def test_closing_waits_for_steps_in_progress(model):
    """Before their resources are released."""
    bindings = Recorder(KERNELS)
    device = HipDevice(model, bindings=bindings)
    steps = Steps(device, "pick", late=True)
    steps.start()
    steps.write(1)
    device.start_ahead("pick", late=True)
    bindings.calls.clear(), bindings.launched.clear()
    device.close()
    head = ["embed_k", "mix_k", "mix_k_1", "last_k"]
    assert [symbol for symbol, *_ in bindings.launched] == [*head, "pick_k", *head]
    assert bindings.calls[0] == "hipStreamSynchronize" and bindings.leaks() == []


def test_no_pinned_memory_is_one_line(model):
    bindings = Recorder(KERNELS)
    device = HipDevice(model, bindings=bindings)
    bindings.fail["hipHostMalloc"] = "hipErrorOutOfMemory"
    with pytest.raises(UserError, match="no pinned host memory is left"):
        check(device)
    bindings.fail.clear()
    check(device)
