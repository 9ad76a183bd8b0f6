"""Measuring from the outside: a session keeps a child process on a device and lives through what candidates do to it.

`Session(device).measure(folders)` -> for each folder a result: what `bench.py` describes, "error" (None, or why there
are no seconds) and, without an error, the figures "us", "gbps", "tflops". A candidate that crashes the process, loses
the device or hangs gets an error; the others are measured by a new process.
"""

import logging
import math
from collections.abc import Callable
from pathlib import Path

from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.measure.candidate import Candidate, figures, read
from mlc_amd.runtime.measure.child import Child, Died

MODULE = "mlc_amd.runtime.measure.program"
START, TIMEOUT = 120.0, 60.0  # seconds: to open a device; without news from a candidate
LOAD = 5.0  # more for each candidate of those that load together
ROUGH = 0.1  # share of the time that others had the processor
MOST_DEATHS = 3  # of a process before the first result: then it is not the candidates

log = logging.getLogger("mlc_amd")


class Session:
    """A device to measure on. device: as the backends take it. timeout: seconds that a candidate may be silent. A
    context manager.

    `facts` ({"device", "driver"}) is there once something was measured or `start` was called.
    """

    def __init__(self, device: str | None = None, timeout: float = TIMEOUT, environment: dict[str, str] | None = None):
        self.device, self.timeout, self.facts = device, timeout, {}
        self._child, self._open, self._warned = Child(MODULE, environment=environment), None, False

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        self._child.close()
        self._open = None

    def start(self, candidate: Candidate) -> dict:
        """Opens the device for candidates like this one; its facts. UserError if there is none."""
        key = (candidate.api, candidate.facts["arch"])
        if self._open != key:
            self.close()
            self._child.send({"open": str(candidate.folder), "device": self.device})
            try:
                self.facts = self._child.receive(START)["facts"]
            except Died as e:
                raise UserError(f"the device for {candidate.api} does not start: {e}; update its driver") from e
            self._open = key
        return self.facts

    def measure(self, folders, progress: Callable[[str, dict], None] = lambda folder, result: None) -> list[dict]:
        """Results in the order of `folders`; progress(folder, result) as they come, again for one that was timed again.

        UserError without a device, or when the process dies whatever it measures. The first candidate of a workload is
        its reference.
        """
        names, results = [str(Path(folder)) for folder in folders], {}
        groups: dict[str, list[Candidate]] = {}
        for name in dict.fromkeys(names):
            candidate = read(name)
            groups.setdefault(candidate.group, []).append(candidate)
        for group in groups.values():
            self._group({str(candidate.folder): candidate for candidate in group}, results, progress)
        return [results[name] for name in names]

    def _group(self, pending: dict[str, Candidate], results: dict, progress) -> None:
        together, lost, reference = True, 0, None

        def keep(folder: str, result: dict) -> None:
            if result["error"] is None:
                self._warn(result["disturbed"])
                result |= figures(candidates[folder].facts, result["seconds"])
            results[folder] = result
            pending.pop(folder, None)
            progress(folder, result)

        candidates = dict(pending)
        while pending:
            self.start(next(iter(candidates.values())))
            # what a new process measures is judged by the reference, too
            doing = list(dict.fromkeys([*([reference] if reference else []), *pending]))
            try:
                self._child.send({"measure": doing, "together": together})
                while True:
                    answer = self._child.receive(self.timeout + LOAD * len(doing))
                    doing = answer.get("doing", doing)
                    if "result" in answer:
                        keep(answer["folder"], answer["result"])
                    if "done" in answer:
                        break
            except Died as e:
                self._open = None
                reference = next(
                    (folder for folder in candidates if results.get(folder, {"error": ""})["error"] is None), None
                )
                if len(doing) == 1 and doing[0] in pending:
                    keep(doing[0], {"error": str(e)})
                    continue
                together, lost = len(doing) == 1, lost + 1
                if lost >= MOST_DEATHS:
                    raise UserError(f"measuring does not work on this machine: {e}") from e

    def _warn(self, disturbed: float) -> None:
        if disturbed > ROUGH and not self._warned:
            self._warned = True
            text = (
                "other programs had the processor for %.0f%% of a measurement: close them, or the best plan may not be "
                "found"
            )
            log.warning(text, min(100 * disturbed, 100))

    def turns(self, folders) -> list[list[float]]:
        """Seconds of a call of each candidate in each case, medians of rounds in which all are timed one after the
        other. UserError if one does not run."""
        self.start(read(folders[0]))
        try:
            self._child.send({"turns": [str(folder) for folder in folders]})
            answer = self._child.receive(self.timeout + LOAD * len(folders))
        except Died as e:
            self._open = None
            raise UserError(f"measuring does not work on this machine: {e}") from e
        if answer["failures"]:
            raise UserError(f"measuring does not work on this machine: {'; '.join(answer['failures'])}")
        return answer["seconds"]

    def compare(self, untuned: Path, tuned: Path, states) -> dict:
        """{"error": worst difference as a share of what is allowed or None, "wrong": [reasons]} of two candidates'
        outputs in these states, the tuned one's of several runs; "gain": how much faster the tuned one is in turns with
        the other, None if it is wrong."""
        self.start(read(tuned))
        try:
            self._child.send(
                {"compare": [str(untuned), str(tuned)], "states": [list(map(int, state)) for state in states]}
            )
            answer = self._child.receive(2 * self.timeout)
        except Died as e:
            self._open = None
            return {"error": None, "wrong": [str(e)], "gain": None}
        return {name: answer[name] for name in ("error", "wrong", "gain")}


def measure(folders, device: str | None = None, progress=lambda folder, result: None) -> list[dict]:
    """`Session.measure` with a session of its own."""
    with Session(device) as session:
        return session.measure(folders, progress)


def best(results: list[dict]) -> int | None:
    """The index of the fastest result; None if all failed."""
    seconds = [result["seconds"] if result["error"] is None else math.inf for result in results]
    return min(range(len(seconds)), key=seconds.__getitem__) if min(seconds, default=math.inf) < math.inf else None
