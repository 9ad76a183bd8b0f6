"""Several GPUs as one device: each computes some of the layers (artifact/stages.py), one step after the other.

Each GPU has a thread, which takes steps from a queue, computes its part and puts them into the queue of the next GPU's
thread. So steps overtake each other nowhere, and as many of them are computed at once as there are GPUs: chunks of a
prompt, or steps of different answers. What a step computes may therefore rely on all that was started before it.

Once a step has failed, what the cache holds is unknown: all later ones fail, too.
"""

import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

import numpy as np

from mlc_amd.runtime.artifact.io_buffers import CHOSEN, LATE
from mlc_amd.runtime.errors import MachineError
from mlc_amd.runtime.sampling.layout import FIELDS, LOGPROB

Result = TypeVar("Result")
Opener = Callable[[], Any]  # opens the device of a stage

AFTER_FAILURE = "a step failed on one of the GPUs; load the model again"
SLICE = 1.0  # seconds of one wait: Ctrl-C is noticed between them


class _Worker:
    """A thread that calls functions in the order in which they came: a GPU's calls belong to one thread.

    It never ends, but waits for the next device: a driver leaves code in threads that used it, which would run at their
    end, when the driver may have been unloaded.
    """

    _idle: ClassVar[list["_Worker"]] = []

    @classmethod
    def take(cls) -> "_Worker":
        """One without work."""
        return cls._idle.pop() if cls._idle else cls()

    def __init__(self):
        self._calls: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="mlc-amd stage", daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], object]) -> None:
        """call: must not raise."""
        self._calls.put(call)

    def begin(self, call: Callable[[], Result]) -> Callable[[], Result]:
        """Starts it; returns a function that waits for its result, or raises its error."""
        done, found, errors = threading.Event(), [], []

        def run() -> None:
            try:
                found.append(call())
            except BaseException as error:
                errors.append(error)
            done.set()

        def result() -> Result:
            _wait(done)
            if errors:
                raise errors[0]
            return found[0]

        self.submit(run)
        return result

    def call(self, call: Callable[[], Result]) -> Result:
        return self.begin(call)()

    def _work(self) -> None:
        while True:
            call = self._calls.get()
            call()
            del call  # it may hold what a `with` block or the garbage collector closes

    def release(self) -> None:
        """After all calls that were submitted. Others may take it then."""
        if self._thread is not threading.current_thread():  # which closes a device that it was the last to use
            self.call(lambda: None)
        self._idle.append(self)


class _Step:
    """A run of a function. inputs, late: written io buffers, (name, values), in order; source: the step whose `sampled`
    are its tokens; carried: what the next stage receives; outputs: by name, once it is done."""

    def __init__(self, function: str, inputs: list[tuple[str, np.ndarray]], source: "_Step | None" = None):
        self.function, self.inputs, self.source = function, inputs, source
        self.late: list[tuple[str, np.ndarray]] = []
        self.complete, self.done = threading.Event(), threading.Event()
        self.carried: np.ndarray | None = None
        self.outputs: dict[str, np.ndarray] = {}
        self.error: BaseException | None = None


class StagedDevice:
    """See runtime/devices/__init__.py for the protocol. openers: of the stages' devices, which are opened at the same
    time, each by the thread that uses it; artifact: the whole one.

    stages: the devices. Between `start` and `wait` further steps may be started; `wait` waits for the oldest.
    """

    def __init__(self, artifact, openers: Sequence[Opener]):
        self.artifact, self.manifest = artifact, artifact.manifest
        self._workers = [_Worker.take() for _ in openers]
        devices: list[Any] = []
        self.close = weakref.finalize(self, _close, self._workers, devices)
        try:
            opened = [worker.begin(opener) for worker, opener in zip(self._workers, openers, strict=True)]
            for result in opened:
                devices.append(None)
                devices[-1] = result()
        except BaseException:
            for i, result in enumerate(opened):  # the others' memory is released, too
                devices[i:] = [_unless_failed(result)]
            self.close()
            raise
        self.stages = devices
        self.kind, self.threads = devices[0].kind, 1
        self.gpu, self.code_arch = devices[0].gpu, devices[0].code_arch
        self.name = " + ".join(device.name for device in devices)
        self.kv_types = self._kv_types()
        self._inputs: list[tuple[str, np.ndarray]] = []  # written since the last step was started
        self._steps: deque[_Step] = deque()  # not waited for
        self._finished: _Step | None = None  # the last that was waited for
        self._failed: BaseException | None = None

    def _kv_types(self) -> dict[str, tuple]:
        """Of all layers; as many pages of a span as the stage has that has fewest."""
        pages: dict[int, int] = {}
        for device in self.stages:
            for entry in device.manifest["kv"]:
                if "span" in entry:
                    count = device.kv_types[entry["name"]][0][0]
                    pages[entry["span"]] = min(count, pages.get(entry["span"], count))
        found = {name: of for device in self.stages for name, of in device.kv_types.items()}
        for entry in self.manifest["kv"]:
            if "span" in entry:
                (_, *shape), dtype = found[entry["name"]]
                found[entry["name"]] = (pages[entry["span"]], *shape), dtype
        return found

    @property
    def waited(self) -> float:
        return max(device.waited for device in self.stages)

    # ---- steps

    @property
    def in_flight(self) -> int:
        """Steps that may be started before the oldest is waited for: one for each GPU, and one that follows at once."""
        return len(self.stages) + 1

    def write(self, name: str, values) -> None:
        self._alive()
        self._inputs.append((name, np.array(values)))

    def can_start_ahead(self, function: str, late: bool = False) -> bool:
        return not late

    def start(self, function: str, meanwhile: Callable[[], None] | None = None) -> None:
        step = self._start(_Step(function, self._taken()))
        try:
            if meanwhile:
                meanwhile()
        finally:
            self._complete(step)  # of a choice that fails, with the inputs so far: the steps after it still come

    def start_ahead(self, function: str, late: bool = False) -> None:
        self._complete(self._start(_Step(function, self._taken(), self._steps[0])))

    def _taken(self) -> list[tuple[str, np.ndarray]]:
        taken, self._inputs = self._inputs, []
        return taken

    def _start(self, step: _Step) -> _Step:
        self._alive()
        self._steps.append(step)
        self._pass_on(step, self._first(step.function))
        return step

    def _complete(self, step: _Step) -> None:
        step.late = self._taken()
        step.complete.set()

    def wait(self) -> None:
        step = self._steps[0]
        _wait(step.done)
        self._finished = self._steps.popleft()
        if step.error:
            raise step.error

    def discard(self) -> None:
        """Waits for steps whose results nobody wants any more, if there are any."""
        while self._steps:
            step = self._steps.popleft()
            step.complete.set()
            _wait(step.done)

    def run(self, function: str, meanwhile: Callable[[], None] | None = None) -> None:
        """Also the results of steps that were started before are dropped."""
        self.start(function, meanwhile)
        while self._steps:
            self.wait()

    def feed(self, function: str) -> None:
        """Runs a function whose results nobody wants; does not wait for all of it."""
        self.start(function)
        while len(self._steps) >= self.in_flight:
            self.wait()

    def run_plain(self, function: str) -> None:
        self._in_turn(function, lambda device: device.run_plain(function))

    def time(self, function: str) -> list[tuple[str, float, float]]:
        """See the protocol. UserError where a GPU cannot."""
        return [one for found in self._in_turn(function, lambda device: device.time(function)) for one in found]

    def read(self, name: str, rows: int) -> np.ndarray:
        """Of the step that was waited for last. Logits: if it samples without log-probabilities, only while no other
        step was started."""
        step = self._finished
        if step and name in step.outputs:
            return step.outputs[name][:rows]
        assert not self._steps, f"{name} of a step after which others were started"
        last = self.stages[-1]
        return self._workers[-1].call(lambda: last.read(name, rows).copy())

    # ---- of all stages

    def clear(self) -> None:
        self.discard()
        for result in [self._begin(i, lambda device: device.clear()) for i in range(len(self.stages))]:
            result()

    def copy_bandwidth(self) -> float:
        """Of the slowest GPU."""
        self.discard()
        found = [self._begin(i, lambda device: device.copy_bandwidth()) for i in range(len(self.stages))]
        return min(result() for result in found)

    def _begin(self, stage: int, call: Callable[[Any], Result]) -> Callable[[], Result]:
        self._alive()
        device = self.stages[stage]
        return self._workers[stage].begin(lambda: call(device))

    def _in_turn(self, function: str, compute: Callable[[Any], Result]) -> list[Result]:
        """A step in which each stage computes its part like this."""
        self.discard()
        step, found = _Step(function, self._taken()), []
        step.complete.set()

        def part(stage: int) -> Callable[[Any], Result]:
            def call(device) -> Result:
                self._write(step, stage)
                result = compute(device)
                self._hand_over(step, stage)
                return result

            return call

        for stage in range(self._first(function), len(self.stages)):
            found.append(self._begin(stage, part(stage))())
        self._finished = step
        return found

    # ---- the stages' threads

    def _first(self, function: str) -> int:
        """The first stage that has a part of it."""
        return next(i for i, device in enumerate(self.stages) if function in device.manifest["functions"])

    def _pass_on(self, step: _Step, stage: int) -> None:
        self._workers[stage].submit(lambda: self._compute(step, stage))

    def _compute(self, step: _Step, stage: int) -> None:
        try:
            if self._failed:
                raise MachineError(AFTER_FAILURE) from self._failed
            self._write(step, stage)
            self.stages[stage].run(step.function)
            self._hand_over(step, stage)
        except BaseException as error:
            step.error, self._failed = error, self._failed or error
            step.done.set()
            return
        if stage + 1 < len(self.stages):
            self._pass_on(step, stage + 1)
        else:
            step.done.set()

    def _write(self, step: _Step, stage: int) -> None:
        """The inputs of a stage's part; waits for what is not known yet."""
        device, known = self.stages[stage], self.manifest["io"]
        tokens: list[tuple[str, np.ndarray]] = []
        if step.source:
            _wait(step.source.done)
            tokens = [("tokens", step.source.outputs.get("sampled", np.zeros(0, np.int32)))]
        last = stage + 1 == len(self.stages)
        if last:
            _wait(step.complete)
        for name, values in [*step.inputs, *tokens, *(step.late if last else [])]:
            if name in known and (last or name not in LATE):
                device.write(name, values)
        if step.carried is not None:
            device.receive(step.carried)
            step.carried = None

    def _hand_over(self, step: _Step, stage: int) -> None:
        device, function = self.stages[stage], self.manifest["functions"][step.function]
        if stage + 1 < len(self.stages):
            step.carried = device.sent(step.function).copy()
            return
        rows = function["logits"]
        wanted = [*CHOSEN] if function["samples"] else []
        flags = next((values for name, values in reversed([*step.inputs, *step.late]) if name == "sampling"), None)
        if not function["samples"] or (flags is not None and (flags[:, FIELDS.index("flags")] & LOGPROB).any()):
            wanted.append("logits")
        step.outputs = {name: device.read(name, rows).copy() for name in wanted if name in self.manifest["io"]}

    def _alive(self) -> None:
        if not self.close.alive:
            raise MachineError("this device is closed; load the model again")


def _wait(event: threading.Event) -> None:
    while not event.wait(SLICE):
        pass


def _unless_failed(result: Callable[[], Result]) -> Result | None:
    try:
        return result()
    except BaseException:  # another stage's error is reported
        return None


def _close(workers: Sequence[_Worker], devices: Sequence[Any]) -> None:
    for worker, device in zip(workers, devices, strict=False):
        if device is not None:
            worker.submit(device.close)
    for worker in workers:
        worker.release()
