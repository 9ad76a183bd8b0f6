"""Times the candidates of one workload side by side, under the conditions of a running model.

In: a backend (`vulkan.py`, `hip.py`, `cpu.py`) and candidates of one group. Out: for each a result, with JSON values:

    seconds     of a call: the mean over its cases of each case's median
    runs        the same for each repetition, in order
    cases       {case: median seconds}
    spread      (90th - 10th percentile) / median, of the worst case: the uncertainty
    outliers    number of repetitions more than OUTLIER above the median
    noise       share of the time in which other programs had the processor, in the worst of the used repetitions
    drift       relative change of the reference's time during the measurement if it stayed above DRIFT, otherwise 0

Conditions: calls rotate over copies of weights and caches that together are larger than the last-level cache, so that
each call reads them from memory; a call waits for the call before it; the device was busy just before. The first
candidate (by convention the untuned kernel) is the reference. It is timed again after every CHECK other candidates. If
its time has changed, clocks have changed, and the candidates since its last timing are timed again.

A backend has `name`, `facts`, `cache` (bytes to rotate over), `target` (seconds that one repetition should take), and

    open(sizes)                     allocates memory for {key: bytes}, in place of the last memory
    put(key, array), get(key, n)    write and read contents as uint8
    load(candidates)                a handle or an exception for each candidate
    bind(handle, candidate, keys)   a call on the buffers of these keys: one for each parameter, then the scratch
                                    buffers
    run(calls)                      seconds on the device's clock for dependent calls; the same sequence often recurs
    noise                           share of the time in which other programs had the processor in the last run
    close()
"""

import time
from collections.abc import Callable

import numpy as np

from mlc_amd.runtime.measure.candidate import PRIVATE, ROLES, ROTATING, STEP, WRITTEN, Candidate, Param
from mlc_amd.runtime.measure.inputs import fill

REPEATS = 7
FEWER = 3  # repetitions of slow candidates
SLOW = 3.0  # a candidate is slow if it takes so many times the reference's time
LONG = 0.5  # a call that takes so many seconds is long
MAX_CALLS, MAX_COPIES = 2000, 1024
BUSY = 0.25  # seconds of work before the first timing
IDLE = 0.05  # seconds of idleness after which clocks may have fallen
CHECK = 8  # candidates between two timings of the reference
OUTLIER, DRIFT, SPREAD = 0.2, 0.1, 0.1
QUANTILE = 25  # percentile of the rounds' gains that is the result
ROUNDS = 15  # interleaved rounds
LONGEST = 5.0  # seconds after which FEWER rounds are enough
# limit of the noise of used repetitions, if enough of ATTEMPTS times as many, or those in PATIENCE seconds, are below
MAX_NOISE = 0.03
ATTEMPTS, PATIENCE = 3, 1.0


class Bench:
    """Candidates of one group in memory. failures: {number: error} of candidates that cannot be loaded."""

    def __init__(self, backend, candidates: list[Candidate]):
        self.backend, self.candidates = backend, candidates
        first = candidates[0]
        rotating = [p for p in first.params if p.role in ROTATING]
        shared = [p for p in first.params if p.role not in (*ROTATING, *PRIVATE)]
        self.copies = _copies(first, rotating, backend.cache)
        sizes: dict = {(copy, p.name): p.nbytes for copy in range(self.copies) for p in rotating}
        sizes |= {("shared", p.name): p.nbytes for p in shared}
        for candidate in candidates:
            for key, nbytes in _private(candidate).items():
                sizes[key] = max(sizes.get(key, 0), nbytes)
        backend.open(sizes)
        self._fill(first.cases[0]["state"], range(self.copies))
        loaded = backend.load(candidates)
        failed = {i: error for i, error in enumerate(loaded) if isinstance(error, Exception)}
        self.failures = {i: str(error) or type(error).__name__ for i, error in failed.items()}
        self._handles, self._calls, self._copy, self._busy_until = loaded, {}, 0, 0.0

    def _fill(self, state, copies, roles=ROLES) -> None:
        arrays = fill(self.candidates[0], state, roles)
        for param in self.candidates[0].params:
            if param.role in roles and param.role not in PRIVATE:
                for where in copies if param.role in ROTATING else ("shared",):
                    self.backend.put((where, param.name), arrays[param.name].reshape(-1).view(np.uint8))

    def _prepare(self, index: int, state) -> None:
        """Writes the inputs of the case's state, and zeros to the memory of this candidate that must be zero."""
        candidate = self.candidates[index]
        for param in candidate.params:
            if param.role == "zero":
                self.backend.put(("own", param.name), np.zeros(param.nbytes, np.uint8))
        self._fill(state, (), STEP)

    @staticmethod
    def key(param: Param, copy: int = 0):
        """The backend's key for a parameter's memory."""
        return (copy if param.role in ROTATING else "own" if param.role in PRIVATE else "shared", param.name)

    def call(self, index: int, copy: int = 0):
        """The backend's call of a candidate, with that copy of rotating parameters."""
        if (index, copy) not in self._calls:
            candidate = self.candidates[index]
            keys = [self.key(p, copy) for p in candidate.params]
            keys += [("own", i) for i in range(len(candidate.facts["scratch"]))]
            self._calls[index, copy] = self.backend.bind(self._handles[index], candidate, keys)
        return self._calls[index, copy]

    def _run(self, index: int, count: int) -> float:
        """Seconds of one call: the mean of `count` consecutive calls."""
        # Sequences over all copies are equal, so backends can cache them. Shorter ones continue where the last ended.
        self._copy = 0 if count >= self.copies else self._copy
        calls = [self.call(index, (self._copy + i) % self.copies) for i in range(count)]
        self._copy = (self._copy + count) % self.copies
        seconds = self.backend.run(calls) / count
        self._busy_until = time.perf_counter()
        return max(seconds, 1e-9)

    def _count(self, index: int, seconds: float) -> int:
        return min(max(round(self.backend.target / seconds), 1), MAX_CALLS)

    def _warm(self, index: int) -> None:
        """Makes the device busy if it was idle."""
        if time.perf_counter() - self._busy_until < IDLE:
            return
        end, count = time.perf_counter() + BUSY, 1
        while time.perf_counter() < end:
            count = self._count(index, self._run(index, count))

    def _settle(self, index: int, state) -> tuple[float, int]:
        """(seconds of a call, calls per repetition), measured on a busy device."""
        self._prepare(index, state)
        self._warm(index)
        seconds = self._run(index, 1)  # the first launch of a kernel includes work of the driver
        count = self._count(index, seconds)
        if count > 1:
            seconds = self._run(index, min(count, 16))
            count = self._count(index, seconds)
        return seconds, count

    # ---- timing

    def _time(self, index: int, limit: float) -> dict:
        """A result without drift. limit: candidates that take more seconds are slow."""
        cases, rounds, noise = {}, [], 0.0
        for case in self.candidates[index].cases:
            first, count = self._settle(index, case["state"])
            repeats = FEWER if first > LONG or first > limit else REPEATS
            times, others = self._repeat(index, count, repeats)
            if repeats == REPEATS and _spread(times) > SPREAD:
                more, again = self._repeat(index, count, repeats)
                times, others = times + more, max(others, again)
            cases[case["name"]], noise = times, max(noise, others)
            rounds.append(times)
        shortest = min(len(times) for times in rounds)
        medians = {name: float(np.median(times)) for name, times in cases.items()}
        return {
            "seconds": float(np.mean(list(medians.values()))),
            "runs": [float(np.mean([times[i] for times in rounds])) for i in range(shortest)],
            "cases": medians,
            "spread": max(_spread(times) for times in rounds),
            "outliers": sum(bool(t > (1 + OUTLIER) * np.median(times)) for times in rounds for t in times),
            "noise": noise,
            "drift": 0.0,
        }

    def _repeat(self, index: int, count: int, repeats: int) -> tuple[list[float], float]:
        """Returns (seconds of a call in `repeats` repetitions, their noise). They are the least noisy of up to ATTEMPTS
        times as many."""
        found, end = [], time.perf_counter() + PATIENCE
        while len(found) < ATTEMPTS * repeats and sum(others <= MAX_NOISE for others, _, _ in found) < repeats:
            if len(found) >= repeats and time.perf_counter() > end:
                break
            seconds = self._run(index, count)
            found.append((self.backend.noise, len(found), seconds))
        best = sorted(sorted(found)[:repeats], key=lambda one: one[1])
        return [seconds for _, _, seconds in best], max(others for others, _, _ in best)

    def measure(self, doing: Callable[[int], None], done: Callable[[int, dict], None]) -> None:
        """Times all loaded candidates, some again. Calls doing(number) before, done(number, result) after a timing."""
        usable = [i for i in range(len(self.candidates)) if i not in self.failures]
        if not usable:
            return
        reference = _Reference(usable[0], lambda: self._time(usable[0], np.inf), doing, done)
        reference.drift()
        limit, since = SLOW * reference.seconds, []
        for place, index in enumerate(usable[1:], 1):
            doing(index)
            done(index, self._time(index, limit))
            since.append(index)
            if len(since) == CHECK or place == len(usable) - 1:
                if abs(reference.drift()) > DRIFT:
                    self._again(since, reference, limit, doing, done)
                since = []

    def _again(self, indices: list[int], reference: "_Reference", limit: float, doing, done) -> None:
        """Times candidates again that were measured while clocks changed. Marks them if clocks still change."""
        results = []
        for index in indices:
            doing(index)
            results.append(self._time(index, limit))
        drift = reference.drift()
        for index, result in zip(indices, results, strict=True):
            done(index, result | {"drift": drift if abs(drift) > DRIFT else 0.0})

    def gain(self) -> float:
        """The speedup of the second candidate over the first: the lower quartile of interleaved rounds. Without any
        difference, the median would be above 1 half of the time."""
        seconds = self.interleaved().sum(axis=2)
        return float(np.percentile(seconds[:, 0] / seconds[:, 1], QUANTILE))

    def interleaved(self) -> np.ndarray:
        """Seconds of a call, [round, candidate, case]: in a round one after the other, with the same noise."""
        cases, rounds = self.candidates[0].cases, []
        indices = range(len(self.candidates))
        counts = {(place, i): self._settle(i, case["state"])[1] for place, case in enumerate(cases) for i in indices}
        end = time.perf_counter() + LONGEST
        while len(rounds) < FEWER or (len(rounds) < ROUNDS and time.perf_counter() < end):
            seconds = np.zeros((len(indices), len(cases)))
            for place, case in enumerate(cases):
                for index in indices if len(rounds) % 2 else reversed(indices):
                    self._prepare(index, case["state"])
                    seconds[index, place] = self._run(index, counts[place, index])
            rounds.append(seconds)
        return np.array(rounds)

    # ---- results

    def outputs(self, index: int, state, again: bool = False) -> dict[str, np.ndarray]:
        """The parameters that one call writes, with fresh inputs. again: the last call was for this state, too; its
        inputs are used again, as no kernel may write them."""
        self._fill(state, range(1), WRITTEN if again else ROLES)
        self._prepare(index, state)
        self.backend.run([self.call(index, 0)])
        written = [p for p in self.candidates[index].params if p.role in WRITTEN]
        raw = {p.name: self.backend.get(self.key(p), p.nbytes) for p in written}
        return {p.name: np.frombuffer(raw[p.name], np.uint8).view(p.numpy).reshape(p.shape) for p in written}


class _Reference:
    """The kernel to which the others are compared. seconds: the median of its timings, which ignores an outlier."""

    def __init__(self, index: int, time_it: Callable[[], dict], doing, done):
        self.index, self._time_it, self._doing, self._done, self._results = index, time_it, doing, done, []

    @property
    def seconds(self) -> float:
        return float(np.median([result["seconds"] for result in self._results]))

    def drift(self) -> float:
        """Times it again. Returns the relative difference to the median; its result is the timing nearest to that."""
        self._doing(self.index)
        self._results.append(self._time_it())
        self._done(self.index, min(self._results, key=lambda result: abs(result["seconds"] - self.seconds)))
        return self._results[-1]["seconds"] / self.seconds - 1


def _copies(candidate: Candidate, rotating, cache: int) -> int:
    """The number of copies of rotating parameters: enough to exceed the cache, but they must fit the memory."""
    total = sum(p.nbytes for p in rotating)
    if not total:
        return 1
    weights = int(sum(p.nbytes * p.share for p in rotating if p.role == "weight"))
    read = min(total, max(weights, int(min(case["bytes"] for case in candidate.cases)), 1))
    return max(1, min(-(-cache // read), max(4 * cache // total, 2), MAX_COPIES))


def _private(candidate: Candidate) -> dict:
    """The keys of a candidate's own memory, with bytes."""
    own = {("own", p.name): p.nbytes for p in candidate.params if p.role in PRIVATE}
    return own | {("own", i): nbytes for i, nbytes in enumerate(candidate.facts["scratch"])}


def _spread(times: list[float]) -> float:
    low, middle, high = np.percentile(times, (10, 50, 90))
    return float((high - low) / middle)
