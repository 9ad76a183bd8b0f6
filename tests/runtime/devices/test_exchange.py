"""GPUs that exchange parts of sums while their kernels run: the relay, its threads, and Vulkan devices and AMD's calls
that stand in for several GPUs."""

import threading
import time
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest
from vulkan_harness import PROFILES, gpu

from mlc_amd.compiler.codegen.relay import relay_code
from mlc_amd.compiler.codegen.spirv import compile_spirv
from mlc_amd.runtime.devices.exchange.check import Kernel, check, parts
from mlc_amd.runtime.devices.exchange.check_vulkan import CheckedVulkanGpu
from mlc_amd.runtime.devices.exchange.hip import PeerBoxes
from mlc_amd.runtime.devices.exchange.relay import RING, Relay, RelayCode, job
from mlc_amd.runtime.devices.exchange.unsuitable import Unsuitable
from mlc_amd.runtime.devices.exchange.vulkan import RelayedBoxes
from mlc_amd.runtime.devices.hip.api import Hip
from mlc_amd.runtime.devices.vulkan.context import Context
from mlc_amd.runtime.devices.vulkan.gpu import Instance
from mlc_amd.runtime.devices.vulkan.memory import VulkanMemory
from mlc_amd.runtime.exchange_layout import EMPTY, FAILED, LINE, RANK, inbox_words, outbox_words
from mlc_amd.schedules.gpu.base import quantize
from mlc_amd.schedules.gpu.exchange.exchange import ExchangePlan, exchange
from mlc_amd.schedules.operators import AllReduce
from tests.dev.hip_recorder import Recorder

PROFILE = PROFILES["lavapipe"]
VALUES = 256
PAUSE = 200  # Mesa's CPU driver leaves loops after 65536 steps, which must take longer than its threads wait for a core


@pytest.fixture(scope="module")
def code(tmp_path_factory):
    file = tmp_path_factory.mktemp("relay") / "relay.bin"
    file.write_bytes(relay_code())
    return file


# ---- the relay


class Boxes:
    """Boxes of so many ranks in arrays, and a relay between them."""

    CAPACITY = 4 * LINE

    def __init__(self, code, parts, threads):
        self.parts = parts
        self.outboxes = [aligned(outbox_words(self.CAPACITY)) for _ in range(parts)]
        self.inboxes = [aligned(inbox_words(parts, self.CAPACITY)) for _ in range(parts)]
        addresses = [[box.ctypes.data for box in boxes] for boxes in (self.outboxes, self.inboxes)]
        self.relay = Relay(RelayCode(code), *addresses, self.CAPACITY, threads)

    def send(self, rank, number, words=CAPACITY, first=0):
        """The rank's words of a round."""
        place = (number & 1) * self.CAPACITY
        self.outboxes[rank][place + first : place + words] = sent(rank, number, words)[first:]

    def received(self, receiver, sender, number, words=CAPACITY):
        slots = self.inboxes[receiver].reshape(self.parts - 1, 2, self.CAPACITY)
        return slots[sender - (sender > receiver), number & 1, :words]

    def arrived(self, number, words=CAPACITY):
        return [
            np.array_equal(self.received(to, of, number, words), sent(of, number, words))
            for to in range(self.parts)
            for of in range(self.parts)
            if to != of
        ]


def aligned(words):
    memory = np.full(words + LINE, EMPTY, np.int64)
    return memory[-memory.ctypes.data // 8 % LINE :][:words]


def sent(rank, number, words):
    return (number << 32) + 1000 * rank + number % 1000 + np.arange(words)


def until(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.fixture(params=[(3, 1), (3, 2), (3, 12), (8, 3)], ids="{0[0]} ranks, {0[1]} threads".format)
def boxes(code, request):
    made = Boxes(code, *request.param)
    yield made
    made.relay.close()


def test_words_go_to_all_others(boxes):
    boxes.relay.begin(40, boxes.CAPACITY)
    for number in range(1, 41):
        for rank in range(boxes.parts):
            boxes.send(rank, number)
        until(lambda number=number: all(boxes.arrived(number)))
        assert all((box == EMPTY).all() for box in boxes.outboxes)


def test_a_line_waits_for_all_of_its_words(boxes):
    boxes.relay.begin(1, 2 * LINE)
    for rank in range(boxes.parts):
        boxes.send(rank, 1, 2 * LINE - 1)
    until(lambda: all(boxes.arrived(1, LINE)))
    time.sleep(0.05)
    others = [boxes.received(to, of, 1, 2 * LINE)[LINE:] for to, of in ((0, 1), (1, 0), (2, 1))]
    assert all((words == EMPTY).all() for words in others)
    for rank in range(boxes.parts):
        boxes.send(rank, 1, 2 * LINE)
    until(lambda: all(boxes.arrived(1, 2 * LINE)))


def test_rounds_of_few_words_count_for_all_threads(boxes):
    for number, words in ((1, LINE), (2, boxes.CAPACITY), (3, LINE), (4, boxes.CAPACITY)):
        boxes.relay.begin(1, words)
        for rank in range(boxes.parts):
            boxes.send(rank, number, words)
        until(lambda number=number, words=words: all(boxes.arrived(number, words)))


@pytest.mark.parametrize("stripe", (0, 2))
def test_threads_that_are_ahead_take_no_lines_of_others(code, stripe):
    """One of two is late by two rounds, the second of which is smaller: the other waits for its own lines."""
    unit = LINE << stripe
    mapped, capacity, lines = RelayCode(code), 4 * unit, np.zeros(RING, np.int64)
    run = mapped.call
    outbox, inbox, asked = aligned(2 * capacity), aligned(2 * capacity), np.zeros(1, np.int64)
    boxes = [(outbox.ctypes.data, [inbox.ctypes.data])]
    shares = [job(asked, lines, boxes, capacity, way, 2, stripe) for way in (0, 1)]
    lines[:3], asked[0] = (4 << stripe, 4 << stripe, (2 << stripe) - (stripe > 0)), 3
    outbox[capacity:], outbox[:capacity] = first, second = sent(0, 1, capacity), sent(0, 2, capacity)
    assert run(shares[1].ctypes.data) == 1  # the third round was not sent
    assert (outbox == EMPTY).sum() == capacity
    assert run(shares[0].ctypes.data) == 1
    np.testing.assert_array_equal(inbox, [*second, *first])
    last = int(lines[2]) * LINE  # the end of the last stripe is no whole one
    outbox[capacity : capacity + last] = third = sent(0, 3, last)
    assert [run(share.ctypes.data) for share in shares] == [0, 0]
    np.testing.assert_array_equal(inbox[capacity:], [*third, *first[last:]])
    assert (outbox == EMPTY).all()


def test_stop_ends_rounds_that_nobody_answers(boxes):
    boxes.relay.begin(1000, boxes.CAPACITY)
    boxes.send(0, 1)
    begin = time.monotonic()
    boxes.relay.stop()
    assert time.monotonic() - begin < 10
    boxes.relay.begin(1, boxes.CAPACITY)
    for rank in range(boxes.parts):
        boxes.send(rank, 1)
    until(lambda: all(boxes.arrived(1)))


# ---- Vulkan devices


def exchange_kernel(parts, groups=1, values=VALUES):
    op, plan = AllReduce(m=1, n=values, parts=parts, residual=True), ExchangePlan(groups, 16, PAUSE)
    kernel = exchange(op, values // 4, PROFILE, "exchange", plan=plan)
    compiled = compile_spirv({"exchange": kernel}, PROFILE)
    (launch,), (made,) = compiled.functions["exchange"].launches, compiled.modules.values()
    return Kernel(made.binary, made.grid, made.block, launch.args, values)


class Devices:
    """Several devices of Mesa's CPU driver, each with threads of its own, and boxes between them."""

    def __init__(self, held, code, parts, values=VALUES):
        instances = [held.enter_context(Instance()) for _ in range(parts)]
        self.contexts = [Context(instance, instance.gpus[gpu().index], held) for instance in instances]
        self.boxes = RelayedBoxes([VulkanMemory(context) for context in self.contexts], values // 4, code)
        held.callback(self.boxes.close)

    def check(self, kernel, rounds):
        numbers = parts(len(self.contexts), kernel.values)
        gpus = [
            CheckedVulkanGpu(context, self.boxes, rank, kernel, numbers[rank], PROFILE.push, PROFILE.wave)
            for rank, context in enumerate(self.contexts)
        ]
        return check(gpus, self.boxes, kernel.values, rounds)


@pytest.mark.parametrize(
    ("gpus", "groups", "rounds"),
    [(2, 1, 256), *(pytest.param(*case, marks=pytest.mark.full) for case in ((2, 2, 6000), (3, 1, 1024), (8, 1, 320)))],
)
def test_all_words_of_thousands_of_rounds(code, gpus, groups, rounds):
    gpu()
    with ExitStack() as held:
        devices = Devices(held, code, gpus)
        kernel = exchange_kernel(gpus, groups)
        for _ in range(2):  # also after a reset
            assert devices.check(kernel, rounds // 2) > 0


def test_wrong_words_are_found(code, monkeypatch):
    gpu()
    monkeypatch.setattr(quantize, "HALF_MAX", 50.0)  # the kernel sends other numbers than it has
    with ExitStack() as held, pytest.raises(Unsuitable, match="got wrong words"):
        Devices(held, code, 2).check(exchange_kernel(2), 64)


def test_silent_gpus_end_a_step_with_an_error(code):
    gpu()
    with ExitStack() as held:
        devices = Devices(held, code, 2)
        kernel, begin = exchange_kernel(2), time.monotonic()
        with pytest.MonkeyPatch.context() as patch, pytest.raises(Unsuitable, match="do not reach"):
            patch.setattr(devices.boxes, "begin", lambda rounds, words: None)
            devices.check(kernel, 64)
        assert time.monotonic() - begin < 60
        devices.check(kernel, 64)  # works again


@pytest.mark.parametrize("fault", ["ends", "is stuck"])
def test_a_thread_that_fails_ends_a_step_with_an_error(code, fault, monkeypatch):
    """And leaves no thread: one that is stuck for some seconds is waited for."""
    gpu()
    before = {thread for thread in threading.enumerate() if thread.name == "mlc-amd relay"}

    def broken(job):
        if fault == "ends":
            raise OSError("killed")
        time.sleep(3)
        return 0

    with ExitStack() as held:
        devices = Devices(held, code, 2)
        kernel = exchange_kernel(2)
        with monkeypatch.context() as patch, pytest.raises(Unsuitable, match="do not reach"):
            patch.setattr(threading, "excepthook", lambda args: None)
            patch.setattr(devices.boxes._relay.code, "call", broken)
            devices.check(kernel, 64)
    assert {thread for thread in threading.enumerate() if thread.name == "mlc-amd relay"} <= before


def test_memory_that_the_host_cannot_write_is_refused(code):
    gpu()
    with ExitStack() as held:
        instance = held.enter_context(Instance())
        memory = VulkanMemory(Context(instance, instance.gpus[gpu().index], held))
        memory.gpu = replace(memory.gpu, memory=((1, 0), (6, 0), (14, 0)))  # as of cards without resizable BAR
        with pytest.raises(Unsuitable, match=r"no memory of its own .* Resizable BAR"):
            RelayedBoxes([memory, memory], VALUES // 4, code)


# ---- AMD's own API


def test_amd_gpus_write_to_each_other():
    bindings = Recorder({}, gpus=[{}] * 3)
    boxes = PeerBoxes(Hip(bindings), [0, 1, 2], 64)
    assert bindings.reached == {(a, b) for a in range(3) for b in range(3) if a != b}
    inboxes = [address for _, address in bindings.fine]
    assert [gpu for gpu, _ in bindings.fine] == [0, 1, 2]
    rows = 2 * 64 * 8
    inbox, first, second, control = boxes.arguments(1)
    assert inbox == inboxes[1] and (first, second) == (inboxes[0], inboxes[2] + rows)
    assert (bindings.bytes_at(inbox, 2 * rows) == EMPTY & 0xFF).all()
    words = bindings.bytes_at(control, 16).view(np.int32)
    assert words[RANK] == 1 and boxes.failed() == []
    words[FAILED] = 1
    assert boxes.failed() == [1]
    boxes.reset()
    assert boxes.failed() == [] and words[RANK] == 1
    PeerBoxes(Hip(bindings), [0, 1], 64).close()  # access that is allowed already is no error
    boxes.close()
    assert bindings.leaks() == []


def test_amd_gpus_without_access_are_refused():
    bindings = Recorder({}, gpus=[{}, {"peers": False}])
    with pytest.raises(Unsuitable, match="GPU 1 cannot access the memory of GPU 0"):
        PeerBoxes(Hip(bindings), [0, 1], 64)
    assert bindings.leaks() == []
