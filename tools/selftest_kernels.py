"""Every kernel of an artifact alone on this machine's device, against numpy (tools/reference): the first part of
`mlc-amd selftest`.

In: an artifact and the device that runs it. Out: for each kernel a dict, as dist/README.md lists them. Inputs are made
as for tuning (runtime/measure/inputs.py), so neither weights nor a compiler are needed. Of large outputs some rows and
some blocks of columns are compared, the first and the last among them.
"""

from collections.abc import Callable, Iterator

import numpy as np

from mlc_amd.runtime.devices.hip.api import HipError
from mlc_amd.runtime.devices.vulkan.api import VulkanError
from mlc_amd.runtime.devices.vulkan.memory import OutOfMemory
from mlc_amd.runtime.measure.candidate import STEP, Candidate, Param
from mlc_amd.runtime.measure.inputs import SIGNATURE, fill
from mlc_amd.runtime.measure.program import open_backend
from mlc_amd.runtime.measure.timing import Bench
from mlc_amd.tools.reference.activations import BLOCK
from mlc_amd.tools.reference.case import Case
from mlc_amd.tools.reference.compare import difference
from mlc_amd.tools.reference.operators import OPERATORS, results, wanted_rows
from mlc_amd.tools.reference.plan import layout_of

ROWS, BLOCKS = 8, 8  # at most, that are compared of an output
TIMES = 3  # that a kernel runs in each state
DEPTHS = (0, 70, 1000, 1 << 30)  # tokens in the cache where joins are tested; limited to the context
FAILURES = (HipError, VulkanError, OutOfMemory, RuntimeError)  # of a device, while it runs a kernel
NO_REFERENCE = "no reference"


def candidate_of(artifact, entry: dict, arch: str) -> Candidate:
    """A kernel as runtime/measure takes it. entry: of the manifest's `kernels`; arch: of the code that runs here."""
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
    return Candidate(artifact.path, facts | made | {"params": entry["params"], "states": entry["states"]})


def check_all(
    artifact, arch: str, device: str | None, runs: int, doing: Callable[[str], None] = lambda name: None
) -> Iterator[dict]:
    """A result for each kernel, in the manifest's order. device: as the backends take it; runs: of each kernel whose
    workgroups meet; doing(name): called before each."""
    backend, layout = None, layout_of(artifact)
    try:
        for entry in artifact.manifest["kernels"]:
            found = {"kernel": entry["name"], "operator": entry["operator"], "states": len(entry["states"])}
            doing(entry["name"])
            if entry["operator"] not in OPERATORS:
                yield found | {"deviation": None, "problem": None, "note": NO_REFERENCE}
                continue
            candidate = candidate_of(artifact, entry, arch)
            if backend is None:
                backend = open_backend(candidate, device)
                backend.cache = 0  # one copy of everything
            yield found | _check(backend, candidate, layout, runs)
    finally:
        if backend is not None:
            backend.close()


def _check(backend, candidate: Candidate, layout: str, runs: int) -> dict:
    """deviation: the largest difference as a share of what is allowed (None: not finite); problem: what is wrong, or
    None; joins: of kernels whose workgroups meet, see `_join`."""
    found: dict = {"deviation": None, "problem": None}
    try:
        bench = Bench(backend, [candidate])
        if bench.failures:
            return found | {"problem": f"it does not load: {bench.failures[0]}"}
        worst, wrong = _deviation(bench, candidate, layout)
        found |= {"deviation": worst if np.isfinite(worst) else None, "problem": wrong or None}
        if runs and any(param.role == "zero" for param in candidate.params):
            joins = [_join(bench, candidate, depth, runs) for depth in _depths(candidate)]
            failed = sum(join["failed"] for join in joins)
            found["joins"] = joins
            if failed and not wrong:
                found["problem"] = f"its workgroups do not meet: {failed} of {runs * len(joins)} runs are wrong"
    except FAILURES as e:
        found["problem"] = f"it does not run: {e}"
    return found


def _deviation(bench: Bench, candidate: Candidate, layout: str) -> tuple[float, str]:
    """(the worst state's difference as a share of what is allowed, what is wrong). Each state is run TIMES: a kernel
    with a race may be right once."""
    work = candidate.facts["workload"]
    worst, wrong, states = 0.0, "", candidate.facts["states"]
    inputs = fill(candidate, states[0]) if states else {}
    for state in states:
        found, *others = (bench.outputs(0, state, again=True) for _ in range(TIMES))
        arrays = inputs | fill(candidate, state, STEP)
        rows = wanted_rows(work["op"], work["args"], arrays)
        case = Case(work["op"], work["args"], arrays, layout, _some(rows, ROWS), _columns)
        share, why = difference(work["args"], candidate.facts["params"], found, results(case))
        if not why and any(found[name].tobytes() != other[name].tobytes() for other in others for name in found):
            why = f"its results differ between {TIMES} runs: a race?"
        worst, wrong = max(worst, share), wrong or (f"{why} (state {state[:3]})" if why else "")
    return worst, wrong


def _some(items: np.ndarray, most: int) -> np.ndarray:
    """The first and the last ones, and others at random."""
    if len(items) <= most:
        return items
    chosen = np.random.default_rng(0).choice(np.arange(1, len(items) - 1), most - 2, replace=False)
    return items[np.sort([0, *chosen, len(items) - 1])]


def _columns(n: int) -> np.ndarray:
    """Whole blocks of columns."""
    columns = _some(np.arange(-(-n // BLOCK)), BLOCKS)[:, None] * BLOCK + np.arange(BLOCK)
    return columns[columns < n]


# ---- joins


def _depths(candidate: Candidate) -> list[int]:
    args = candidate.facts["workload"]["args"]
    last = args["ctx"] - args.get("m", 1) if "ctx" in args else 0
    return list(dict.fromkeys(min(depth, last) for depth in DEPTHS))


def _join(bench: Bench, candidate: Candidate, depth: int, runs: int) -> dict:
    """Runs a kernel whose workgroups meet again and again: the counters that they meet at are set before the first run
    only. depth: tokens in the cache; failed: runs whose results are not bit for bit the first one's, or that leave a
    counter other than zero. The last workgroup joins all parts in their order, so results do not depend on who is
    last. Of a kernel for steps that have single rows and a chunk, the single rows run: only their workgroups meet."""
    m = candidate.facts["workload"]["args"].get("m", 1)
    single = max((single for _, _, single, _ in candidate.facts["states"]), default=0)
    rows = single or m
    first = bench.outputs(0, [depth, rows, single, 0], again=True)
    outputs = [param for param in candidate.params if param.role == "output"]
    zeros = [param for param in candidate.params if param.role == "zero"]
    call, backend, failed = bench.call(0), bench.backend, 0
    expected = {param.name: first[param.name].tobytes()[: _bytes_of(param, rows, m)] for param in outputs}
    empty = {name: np.full(len(raw), SIGNATURE, np.uint8) for name, raw in expected.items()}
    for _ in range(runs):
        for param in outputs:
            backend.put(bench.key(param), empty[param.name])
        backend.run([call])
        same = all(backend.get(bench.key(param), len(raw := expected[param.name])) == raw for param in outputs)
        failed += not same or any(any(backend.get(bench.key(param), param.nbytes)) for param in zeros)
    return {"depth": depth, "runs": runs, "failed": failed}


def _bytes_of(param: Param, rows: int, m: int) -> int:
    """Of the first rows of an output of m rows, and of those that are in a tile with them."""
    tiles = param.shape[0]  # a row each, or several
    return -(-rows * tiles // m) * (param.nbytes // tiles)
