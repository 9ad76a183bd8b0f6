"""The first part of `mlc-amd selftest`: runs every kernel of an artifact alone on this machine's device, and compares
the results with numpy (tools/reference).

In: an artifact and the device that runs it. Out: a dict for each kernel, as dist/README.md specifies. Inputs are made
as for tuning (runtime/measure/inputs.py), so neither weights nor a compiler is needed. For large outputs, some rows and
some blocks of columns are compared, including the first and the last. Sequences have the full length of the context,
but page tables repeat a few pages, so that caches are small even if the context is long.
"""

import math
from collections.abc import Callable, Iterator

import numpy as np

from mlc_amd.runtime.artifact.ranks import EXCHANGES
from mlc_amd.runtime.cache.pages import PAGE
from mlc_amd.runtime.devices.hip.api import HipError
from mlc_amd.runtime.devices.vulkan.api import DEVICE_LOST, VulkanError
from mlc_amd.runtime.devices.vulkan.memory import OutOfMemory
from mlc_amd.runtime.measure.candidate import STEP, Candidate, Param
from mlc_amd.runtime.measure.inputs import SIGNATURE, fill
from mlc_amd.runtime.measure.program import open_backend
from mlc_amd.runtime.measure.timing import Bench
from mlc_amd.schedules.operators import from_json
from mlc_amd.tools.checks.selftest_limits import Budget, Watch
from mlc_amd.tools.reference.activations import BLOCK
from mlc_amd.tools.reference.case import Case
from mlc_amd.tools.reference.compare import difference
from mlc_amd.tools.reference.operators import has_reference, results, wanted_rows
from mlc_amd.tools.reference.plan import layout_of
from mlc_amd.tools.terminal import terminal

ROWS, BLOCKS = 8, 8  # largest numbers of rows, and of blocks of columns, that are compared of an output
TIMES = 3  # runs of a kernel in each state
DEPTHS = (0, 70, 1000, 1 << 30)  # tokens in the cache for the tests of joins; limited to the context
FAILURES = (HipError, VulkanError, OutOfMemory, RuntimeError)  # errors of a device while it runs a kernel
# After these errors, the device cannot be used any more in this process.
LOST = (DEVICE_LOST, "hipErrorLaunchFailure", "hipErrorLaunchTimeOut", "hipErrorIllegalAddress", "hipErrorIllegalState")
PAGES = 16  # least number of pages of a cache; the rows of a chunk are in different pages
NO_REFERENCE, NO_TIME, NO_DEVICE = "no reference", "not run (time)", "not run (device lost)"


def candidate_of(artifact, entry: dict, arch: str) -> Candidate:
    """A kernel in the form for runtime/measure. entry: of the manifest's `kernels`. arch: of the code that runs
    here."""
    manifest, name = artifact.manifest, entry["name"]
    target = manifest["target"]
    if target["kind"] == "cpu":
        code, needs = manifest["libraries"][target["arch"]], {"flags": target["flags"]}
        made = {"scratch": [], "steps": [{"symbol": name, "args": list(range(len(entry["params"])))}]}
    else:
        code, needs = manifest["libraries"][arch], target.get("needs", {}).get(arch)
        made = manifest["launches"][arch][name]
    work = {"op": entry["operator"], "args": entry["args"]}
    cases = [{"name": "first", "state": state, "bytes": 1, "flops": 0} for state in entry["states"][:1]]
    facts = {"api": target["kind"], "arch": arch, "needs": needs, "code": code, "workload": work, "cases": cases}
    facts["plan"] = entry["tuned"].get(arch, {}).get("plan")
    return Candidate(artifact.path, facts | made | {"params": _few_pages(entry), "states": entry["states"]})


def _few_pages(entry: dict) -> list[dict]:
    """A kernel's parameters, with caches of few pages, which page tables repeat."""
    count = max(PAGES, entry["args"].get("m", 1) // PAGE + 2)
    count = min([count, *(param["shape"][0] for param in entry["params"] if param["role"] == "cache")])
    changes = {"cache": lambda param: {"shape": [count, *param["shape"][1:]]}, "pages": lambda param: {"pages": count}}
    return [param | changes[param["role"]](param) if param["role"] in changes else param for param in entry["params"]]


def in_turn(kernels: list[dict]) -> list[dict]:
    """The manifest's kernels, in an order in which most are checked soon: first one kernel of each operator, then the
    others; small kernels first."""

    def cost(entry: dict) -> int:
        """Number of elements of a kernel's parameters, in all of its states."""
        return sum(math.prod(param["shape"]) for param in _few_pages(entry)) * max(len(entry["states"]), 1)

    small = sorted(kernels, key=cost)
    firsts = {entry["operator"]: entry["name"] for entry in reversed(small)}
    return sorted(small, key=lambda entry: entry["name"] != firsts[entry["operator"]])


def check_all(
    artifact,
    arch: str,
    device: str | None,
    runs: int,
    doing: Callable[[str], None] = lambda name: None,
    budget: Budget | None = None,
    watch: Watch | None = None,
) -> Iterator[dict]:
    """A result for each kernel, in the order of `in_turn`. device: as for the backends. runs: number of runs of each
    kernel whose workgroups synchronize. doing(name): called before each kernel. When the time is up, the kernel in
    progress is checked in fewer states, and the remaining ones get NO_TIME. After a kernel that the device does not
    survive, they get NO_DEVICE."""
    backend, layout, lost = None, layout_of(artifact), False
    budget, watch = budget or Budget(), watch or Watch("", terminal.Status(), None)
    try:
        for entry in in_turn(artifact.manifest["kernels"]):
            found = {"kernel": entry["name"], "operator": entry["operator"], "states": len(entry["states"])}
            # a kernel alone has no parts of other GPUs; the comparison of logits covers these kernels
            unknown = not has_reference(entry["operator"]) or entry["operator"] in EXCHANGES
            if note := NO_REFERENCE if unknown else NO_DEVICE if lost else NO_TIME if budget.over else "":
                states = found["states"] if unknown else 0
                yield found | {"states": states, "deviation": None, "problem": None, "note": note}
                continue
            doing(entry["name"])
            candidate = candidate_of(artifact, entry, arch)
            if backend is None:
                backend = open_backend(candidate, device)
                backend.cache = 0  # one copy of everything
            found |= Check(backend, candidate, budget, watch).result(layout, runs)
            lost = found.pop("lost", False)
            yield found
    finally:
        if backend is not None:
            backend.close()


class Check:
    """Checks one kernel on a backend (runtime/measure/timing.py)."""

    def __init__(self, backend, candidate: Candidate, budget: Budget | None = None, watch: Watch | None = None):
        self.backend, self.candidate = backend, candidate
        self.budget, self.watch = budget or Budget(), watch or Watch("", terminal.Status(), None)
        self.name = f"kernel {candidate.facts['steps'][0]['symbol']}"

    def result(self, layout: str, runs: int) -> dict:
        """The result of the check. deviation: the largest difference as a share of the tolerance (None: not finite).
        problem: description of an error, or None. states: number of states in which it ran. joins: for kernels whose
        workgroups synchronize, see `_join`. lost: whether the device can no longer be used."""
        candidate = self.candidate
        found: dict = {"deviation": None, "problem": None}
        try:
            self.bench = Bench(self.backend, [candidate])
            if self.bench.failures:
                return found | {"problem": f"it does not load: {self.bench.failures[0]}"}
            worst, wrong, states = self._deviation(layout)
            found |= {"deviation": worst if np.isfinite(worst) else None, "problem": wrong or None, "states": states}
            if runs and any(param.role == "zero" for param in candidate.params):
                op = from_json(candidate.facts["workload"])
                depths = dict.fromkeys(min(depth, max(op.positions - op.m, 0)) for depth in DEPTHS)
                joins = [self._join(depth, runs) for depth in depths if not self.budget.over]
                failed = sum(join["failed"] for join in joins)
                found["joins"] = joins
                if failed and not wrong:
                    total = sum(join["runs"] for join in joins)
                    found["problem"] = f"its workgroups do not meet: {failed} of {total} runs are wrong"
        except FAILURES as e:
            found["problem"] = f"it does not run: {e}"
            if getattr(e, "code", "") in LOST:
                found["lost"] = True
        return found

    def _deviation(self, layout: str) -> tuple[float, str, int]:
        """(the worst state's difference as a share of the tolerance, description of an error, number of states). It
        runs TIMES in each state, because a kernel with a race may be right once."""
        facts = self.candidate.facts
        op, states = from_json(facts["workload"]), facts["states"]
        worst, wrong, done = 0.0, "", 0
        inputs = fill(self.candidate, states[0]) if states else {}
        for state in states:
            if done and self.budget.over:
                break
            with self.watch.over(self.name):
                found, *others = (self.bench.outputs(0, state, again=True) for _ in range(TIMES))
            arrays = inputs | fill(self.candidate, state, STEP)
            case = Case(op, arrays, layout, _some(wanted_rows(op, arrays), ROWS), _columns)
            share, why = difference(op, facts["params"], found, results(case), self.candidate.int8)
            if not why and any(found[name].tobytes() != other[name].tobytes() for other in others for name in found):
                why = f"its results differ between {TIMES} runs: a race?"
            worst, wrong = max(worst, share), wrong or (f"{why} (state {state[:3]})" if why else "")
            done += 1
        return worst, wrong, done

    def _join(self, depth: int, runs: int) -> dict:
        """Runs a kernel whose workgroups synchronize: `runs` times, or until the time is up. Their counters are only
        set before the first run. depth: tokens in the cache. failed: number of runs whose results are not bit for bit
        those of the first run, or that leave a counter other than zero. The last workgroup joins all parts in a fixed
        order, so results do not depend on which one is last. If the kernel has single rows and a chunk, only the single
        rows run, as only their workgroups synchronize."""
        candidate, bench, backend = self.candidate, self.bench, self.backend
        m = from_json(candidate.facts["workload"]).m
        single = max((single for _, _, single, _ in candidate.facts["states"]), default=0)
        rows = single or m
        with self.watch.over(self.name):
            first = bench.outputs(0, [depth, rows, single, 0], again=True)
        outputs = [param for param in candidate.params if param.role == "output"]
        zeros = [param for param in candidate.params if param.role == "zero"]
        call, done, failed = bench.call(0), 0, 0
        expected = {param.name: first[param.name].tobytes()[: _bytes_of(param, rows, m)] for param in outputs}
        empty = {name: np.full(len(raw), SIGNATURE, np.uint8) for name, raw in expected.items()}
        while done < runs and not (done and self.budget.over):
            for param in outputs:
                backend.put(bench.key(param), empty[param.name])
            with self.watch.over(self.name):
                backend.run([call])
            same = all(backend.get(bench.key(param), len(raw := expected[param.name])) == raw for param in outputs)
            failed += not same or any(any(backend.get(bench.key(param), param.nbytes)) for param in zeros)
            done += 1
        return {"depth": depth, "runs": done, "failed": failed}


def _some(items: np.ndarray, most: int) -> np.ndarray:
    """The first and the last items, and random others."""
    if len(items) <= most:
        return items
    chosen = np.random.default_rng(0).choice(np.arange(1, len(items) - 1), most - 2, replace=False)
    return items[np.sort([0, *chosen, len(items) - 1])]


def _columns(n: int) -> np.ndarray:
    """The columns of some whole blocks."""
    columns = _some(np.arange(-(-n // BLOCK)), BLOCKS)[:, None] * BLOCK + np.arange(BLOCK)
    return columns[columns < n]


def _bytes_of(param: Param, rows: int, m: int) -> int:
    """Bytes of the first rows of an output with m rows, including other rows in the same tile."""
    tiles = param.shape[0]  # a tile is one row, or several
    return -(-rows * tiles // m) * (param.nbytes // tiles)
