"""Several GPUs as one device, a pipeline: each GPU is a stage, which computes some of the layers (artifact/stages.py).

A step goes through the stages in order. Different stages compute different steps at the same time: chunks of a prompt,
or steps of different answers. Steps never overtake each other, so a step can rely on all that were started before.

There are no threads for the GPUs. The caller's thread serves all of them whenever it starts a step or waits for one: it
polls the GPUs, and begins on the next stage what a stage has finished (`_advance`). Threads would have to wake one
another, and to share the interpreter, for every step.

After a step has failed, the contents of the KV cache are unknown, so all later steps fail, too.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from mlc_amd.runtime.artifact.io_names import CHOSEN
from mlc_amd.runtime.artifact.manifest import is_encoder
from mlc_amd.runtime.devices import handover
from mlc_amd.runtime.devices.several import PAUSE, Opener, SeveralGpus
from mlc_amd.runtime.sampling.layout import FIELDS, LOGPROB

Result = TypeVar("Result")


class _Step:
    """A run of a function.

    inputs, late: the writes to io buffers before the start, and those of LATE inputs: (name, values), in order.
    complete: whether `late` has all LATE inputs. source: the step whose `sampled` are this step's tokens, or None. at:
    the number of the stage that has received the first `written` of the inputs. part: the part of the `Handover` that
    has its activations. outputs: {name: values}, once it is done."""

    def __init__(
        self, function: str, inputs: list[tuple[str, np.ndarray]], source: "_Step | None" = None, complete: bool = True
    ):
        self.function, self.inputs, self.source, self.complete = function, inputs, source, complete
        self.late: list[tuple[str, np.ndarray]] = []
        self.at, self.written, self.part = -1, 0, 0
        self.outputs: dict[str, np.ndarray] = {}
        self.error: BaseException | None = None
        self.done = False


class _Stage:
    """A stage. number: its index. current: the step in progress. waiting: the next steps. used: names of the io buffers
    that its launches or the pacer read. part: the part of the `Handover` to the next stage that its next step uses."""

    def __init__(self, number: int, device):
        self.number, self.device = number, device
        self.current: _Step | None = None
        self.waiting: deque[_Step] = deque()
        launches = [one for function in device.manifest["functions"].values() for one in function["launches"]]
        self.used = {where for one in launches for kind, where, *_ in one["args"] if kind == "io"} | {"state", "rows"}
        self.part = 0

    def write(self, step: _Step) -> None:
        """Writes the known inputs of a step that the device does not have yet. No step may be in progress."""
        if step.at != self.number:
            step.at, step.written = self.number, 0
        known = [*step.inputs, *step.late]
        for name, values in known[step.written :]:
            if name in self.used:
                self.device.write(name, values)
        step.written = len(known)

    def begin(self, step: _Step) -> None:
        self.write(step)
        if step.source and "tokens" in self.used:
            self.device.write("tokens", step.source.outputs["sampled"])
        self.hand_over(step)
        self.current = step
        self.device.begin(step.function)

    def hand_over(self, step: _Step) -> None:
        """Chooses the parts of the two `Handover`s from which the step is received and to which it is sent."""
        self.device.hand_over(step.part, self.part)
        step.part, self.part = self.part, (self.part + 1) % handover.PARTS


class StagedDevice(SeveralGpus):
    """See the module. Further steps may be started between `start` and `wait`; `wait` waits for the oldest step.
    openers, stages: in the order of layers."""

    def __init__(self, artifact, openers: Sequence[Opener]):
        super().__init__(artifact, openers)
        self._stages = [_Stage(number, device) for number, device in enumerate(self.stages)]
        self.waited = 0.0
        self._inputs: list[tuple[str, np.ndarray]] = []  # written since the last step was started
        self._steps: deque[_Step] = deque()  # steps that nobody has waited for yet, the oldest first
        self._finished: _Step | None = None  # the last step that was waited for

    def _connect(self, devices: Sequence[Any]) -> None:
        between = [handover.between([*device.manifest["functions"].values()]) for device in devices[:-1]]
        for device, before, after in zip(devices, [None, *between], [*between, None], strict=True):
            device.connect(before, after)

    # ---- steps

    @property
    def in_flight(self) -> int:
        """How many steps may be started before the caller must wait for the oldest: one for each GPU, and the next."""
        return len(self.stages) + 1

    def write(self, name: str, values) -> None:
        self._alive()
        self._inputs.append((name, np.array(values)))

    def can_start_ahead(self, function: str, late: bool = False) -> bool:
        return not late

    def start(self, function: str, meanwhile: Callable[[], None] | None = None) -> None:
        step = self._start(_Step(function, self._taken(), complete=meanwhile is None))
        if not meanwhile:
            return
        try:
            meanwhile()
        finally:  # if `meanwhile` fails, the step still runs with the inputs so far: later steps depend on its end
            step.late, step.complete = self._taken(), True
            self._advance()

    def start_ahead(self, function: str, late: bool = False) -> None:
        self._start(_Step(function, self._taken(), self._steps[0]))

    def _taken(self) -> list[tuple[str, np.ndarray]]:
        taken, self._inputs = self._inputs, []
        return taken

    def _start(self, step: _Step) -> _Step:
        for earlier in self._steps:
            if earlier.error:  # not reported yet, as nobody has waited for this step
                raise earlier.error
        self._check_usable()
        self._steps.append(step)
        self._stages[self._first(step.function)].waiting.append(step)
        self._advance()
        return step

    def wait(self) -> None:
        step = self._steps[0]
        self._until(step)
        self._finished = self._steps.popleft()
        if step.error:
            raise step.error

    def discard(self) -> None:
        """Waits for all steps, and drops their results."""
        for step in self._steps:
            step.complete = True
        while self._steps:
            self._until(self._steps[0])
            self._steps.popleft()

    def run(self, function: str, meanwhile: Callable[[], None] | None = None) -> None:
        """See the protocol. Drops the results of steps that were started before."""
        self.start(function, meanwhile)
        while self._steps:
            self.wait()

    def feed(self, function: str) -> None:
        """See the protocol. Waits for earlier steps only if too many are in flight."""
        self.start(function)
        while len(self._steps) >= self.in_flight:
            self.wait()

    def run_plain(self, function: str) -> None:
        self._in_turn(function, lambda device: device.run_plain(function))

    def time(self, function: str) -> list[tuple[str, float, float]]:
        """See the protocol. Raises UserError if a GPU cannot measure times."""
        return [one for found in self._in_turn(function, lambda device: device.time(function)) for one in found]

    def _in_turn(self, function: str, compute: Callable[[Any], Result]) -> list[Result]:
        """Runs a step alone, stage by stage, by `compute(device)`. Returns what this returned for each stage."""
        self.discard()
        step, found = _Step(function, self._taken()), []
        for stage in self._stages[self._first(function) : self._last(function) + 1]:
            stage.write(step)
            stage.hand_over(step)
            found.append(compute(stage.device))
        step.outputs, self._finished = self._outputs(step), step
        return found

    def read(self, name: str, rows: int, first: int = 0) -> np.ndarray:
        """See the protocol: results of the step that was waited for last. `logits` of a step that samples without
        log-probabilities are available only while no other step was started."""
        step = self._finished
        if step and name in step.outputs:
            return step.outputs[name][first:rows]
        assert not self._steps, f"{name} of a step after which others were started"
        return self.stages[self._last(step.function) if step else -1].read(name, rows, first)

    # ---- of all stages

    def clear(self) -> None:
        self.discard()
        super().clear()

    def copy_bandwidth(self) -> float:
        self.discard()
        return super().copy_bandwidth()

    # ---- progress

    def _first(self, function: str) -> int:
        """The index of the first stage that has a part of the function."""
        return next(i for i, device in enumerate(self.stages) if function in device.manifest["functions"])

    def _last(self, function: str) -> int:
        """The index of the last stage that has a part of the function. Image encoders run on one stage, the first."""
        having = [i for i, device in enumerate(self.stages) if function in device.manifest["functions"]]
        return having[-1]

    def _until(self, step: _Step) -> None:
        """Serves all GPUs until a step is done."""
        begun = news = time.perf_counter()
        while not step.done:
            moved, now = self._advance(), time.perf_counter()
            news = now if moved else news
            if now - news > self._patience:
                time.sleep(PAUSE)
        self.waited += time.perf_counter() - begun

    def _advance(self) -> bool:
        """Ends the parts of steps that GPUs have finished, begins those that can begin. Returns whether it did any."""
        moved = False
        for stage in reversed(self._stages):  # from the last: a stage is then free when the stage before ends a part
            try:
                ended = stage.current is not None and stage.device.finished()
            except Exception as error:
                self._fail(error)
                return True
            try:
                if ended:
                    following = self._end(stage)
                    self._begin(following)
                moved |= self._begin(stage) or ended
            except BaseException as error:  # also Ctrl-C, which may have interrupted any of these lines
                self._fail(error)
                return True
        if moved:  # writes the inputs of the next parts now, while the GPUs compute
            for before, stage in zip([None, *self._stages], self._stages, strict=False):
                coming = stage.waiting[0] if stage.waiting else before and before.current
                if coming and not stage.current:
                    stage.write(coming)
        return moved

    def _end(self, stage: _Stage) -> _Stage:
        """Ends a stage's part of its current step. Returns the stage that may be able to begin a part now."""
        step, stage.current = stage.current, None
        assert step
        if stage.number < self._last(step.function):
            following = self._stages[stage.number + 1]
            following.waiting.append(step)
            return following
        step.outputs, step.done = self._outputs(step), True
        return self._stages[0]

    def _begin(self, stage: _Stage) -> bool:
        """Begins the stage's next part, if it can, and returns whether it did. A stage may not begin while a step that
        it has finished still waits for the next stage, as that step's memory would be written again."""
        if stage.current or not stage.waiting:
            return False
        step, last = stage.waiting[0], stage is self._stages[-1]
        if (step.source and not step.source.done) or (last and not step.complete):
            return False
        if not last and self._stages[stage.number + 1].waiting:
            return False
        stage.begin(stage.waiting.popleft())
        return True

    def _outputs(self, step: _Step) -> dict[str, np.ndarray]:
        """{name: values} of the results that the last stage has computed. Nothing for image encoders: their results are
        read from the device, in parts."""
        if is_encoder(step.function):
            return {}
        function = self.manifest["functions"][step.function]
        flags = next((values for name, values in reversed([*step.inputs, *step.late]) if name == "sampling"), None)
        logprobs = flags is not None and (flags[:, FIELDS.index("flags")] & LOGPROB).any()
        wanted = [*CHOSEN, "logits"] if logprobs else ["sampled" if function["samples"] else "logits"]
        read, rows = self.stages[-1].read, function["logits"]
        return {name: read(name, rows).copy() for name in wanted if name in self.manifest["io"]}

    def _fail(self, error: BaseException) -> None:
        """Ends all steps with an error."""
        self._failed = self._failed or error
        for stage in self._stages:
            stage.current = None
            stage.waiting.clear()
        for step in self._steps:
            if not step.done:
                step.error, step.done = error, True
