"""Measures in a child process. It keeps the device open, and is replaced when a candidate ends it.

A result is one of `timing.py`, plus "error" (None, or why there are no seconds) and, without an error, the figures
"us", "gbps", "tflops". A candidate that crashes the process, loses the device or hangs gets an error.
"""

import logging
from collections.abc import Callable
from pathlib import Path

from mlc_amd.runtime.closing import Closing
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.measure.candidate import Candidate, figures, read
from mlc_amd.runtime.measure.child import Child, ChildDied

MODULE = "mlc_amd.runtime.measure.program"
SOFTWARE = "llvmpipe"  # the beginning of the name of Mesa's CPU driver
START, TIMEOUT = 120.0, 60.0  # seconds to open a device; seconds between messages about a candidate
LOAD = 5.0  # further seconds for each of the candidates that load together
NOISY = 0.1  # a warning is shown if other programs had the processor for more than this share of the time
# after so many deaths of processes while several candidates load, the machine is assumed to be the cause
MAX_DEATHS = 3

log = logging.getLogger("mlc_amd")


class Measurer(Closing):
    """A device in a child process. A context manager. device: as for the backends. timeout: seconds between messages
    about a candidate. facts: {"device", "driver"} after `start` or the first measurement."""

    def __init__(self, device: str | None = None, timeout: float = TIMEOUT, environment: dict[str, str] | None = None):
        self.device, self.timeout, self.facts = device, timeout, {}
        self._child, self._open, self._warned = Child(MODULE, environment=environment), None, False

    def close(self) -> None:
        self._child.close()
        self._open = None

    def start(self, candidate: Candidate) -> dict:
        """Opens the device for candidates of this kind. Returns its facts. Raises UserError if there is none."""
        key = (candidate.api, candidate.facts["arch"])
        if self._open != key:
            self.close()
            self._child.send({"open": str(candidate.folder), "device": self.device})
            try:
                self.facts = self._child.receive(START)["facts"]
            except ChildDied as e:
                raise UserError(f"the device for {candidate.api} does not start: {e}; update its driver") from e
            self._open = key
        return self.facts

    def measure(self, folders, progress: Callable[[str, dict], None] = lambda folder, result: None) -> list[dict]:
        """Returns the results in the order of `folders`. Calls progress(folder, result) for each candidate, and again
        for one that is timed again. The first candidate of a workload is its reference. Raises UserError if there is no
        device, or if the process dies MAX_DEATHS times while several candidates load."""
        names, results = [str(Path(folder)) for folder in folders], {}
        groups: dict[str, list[Candidate]] = {}
        for name in dict.fromkeys(names):
            candidate = read(name)
            groups.setdefault(candidate.group, []).append(candidate)
        for group in groups.values():
            self._group({str(candidate.folder): candidate for candidate in group}, results, progress)
        return [results[name] for name in names]

    def _group(self, pending: dict[str, Candidate], results: dict, progress) -> None:
        together, lost = True, 0
        reference: str | None = None

        def keep(folder: str, result: dict) -> None:
            if result["error"] is None:
                self._warn(result["noise"])
                result |= figures(candidates[folder].facts, result["seconds"])
            results[folder] = result
            pending.pop(folder, None)
            progress(folder, result)

        candidates = dict(pending)
        while pending:
            self.start(next(iter(candidates.values())))
            # a new process measures the reference again, for comparison
            doing: list[str] = list(dict.fromkeys([*([reference] if reference else []), *pending]))
            try:
                self._child.send({"measure": doing, "together": together})
                while True:
                    answer = self._child.receive(self.timeout + LOAD * len(doing))
                    doing = answer.get("doing", doing)
                    if "result" in answer:
                        keep(answer["folder"], answer["result"])
                    if "done" in answer:
                        break
            except ChildDied as e:
                self._open = None
                right = (folder for folder in candidates if results.get(folder, {"error": ""})["error"] is None)
                reference = next(right, None)
                if len(doing) == 1 and doing[0] in pending:
                    keep(doing[0], {"error": str(e)})
                    continue
                together, lost = len(doing) == 1, lost + 1
                if lost >= MAX_DEATHS:
                    raise UserError(f"measuring does not work on this machine: {e}") from e

    def _warn(self, noise: float) -> None:
        if noise > NOISY and not self._warned:
            self._warned = True
            text = (
                "other programs had the processor for %.0f%% of a measurement: close them, or the best plan may not be "
                "found"
            )
            log.warning(text, min(100 * noise, 100))

    def interleaved(self, folders) -> list[list[float]]:
        """Seconds of each candidate in each case: medians of interleaved rounds. UserError if one does not run."""
        request = {"interleaved": list(map(str, folders))}
        try:
            answer = self._request(folders[0], request, self.timeout + LOAD * len(folders))
        except ChildDied as e:
            raise UserError(f"measuring does not work on this machine: {e}") from e
        if answer["failures"]:
            raise UserError(f"measuring does not work on this machine: {'; '.join(answer['failures'])}")
        return answer["seconds"]

    def compare(self, untuned: Path, tuned: Path) -> dict:
        """Compares the results of two candidates in the `states` of the tuned one, which runs several times. Returns
        the fields of the database's `Checked`: {"checked", "passed", "deviation", "error", "gain"}. gain: the tuned
        candidate's speedup in interleaved rounds, None if its results are wrong."""
        request = {"compare": [str(untuned), str(tuned)]}
        try:
            answer = self._request(tuned, request, 2 * self.timeout)
        except ChildDied as e:
            answer = {"deviation": None, "error": str(e), "gain": None}
        where = "lavapipe" if self.facts["device"].startswith(SOFTWARE) else "device"
        found = {name: answer[name] for name in ("deviation", "error", "gain")}
        return {"checked": where, "passed": not answer["error"]} | found

    def _request(self, folder: str | Path, request: dict, timeout: float) -> dict:
        """Opens the device for the candidate, and returns the answer to a request. Raises ChildDied."""
        self.start(read(folder))
        try:
            self._child.send(request)
            return self._child.receive(timeout)
        except ChildDied:
            self._open = None
            raise
