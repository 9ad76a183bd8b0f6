"""Builds candidates. In: a workload and a plan. Out: a folder with the kernel's code and all that is needed to measure
it (runtime/measure/candidate.py describes it).

`build` builds in this process. `Builder` builds in worker processes, which import TVM once: a build that crashes, hangs
or takes too much memory only loses its own candidate. Run as a program, this module is such a worker.
"""

import functools
import hashlib
import importlib
import json
import os
import resource
from concurrent.futures import as_completed
from dataclasses import asdict
from pathlib import Path

from mlc_amd.compiler.work import work
from mlc_amd.runtime.closing import Closing
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.host import available_threads
from mlc_amd.runtime.measure.candidate import Candidate, write
from mlc_amd.runtime.measure.child import ChildDied, Children, serve
from mlc_amd.schedules.operators import from_json

MODULE = "mlc_amd.compiler.tuning.build"
TIMEOUT = 180.0  # time limit of one build, seconds
MEMORY = 8 << 30  # limit of a worker's address space, bytes
KERNEL = "kernel"


@functools.lru_cache(maxsize=8)
def target(kind: str, arch: str):
    """`make_target`, cached."""
    from mlc_amd.compiler.codegen.target import make_target  # slow; importing this module must be fast

    return make_target(kind, arch)


def make(workload, plan, kind: str, arch: str):
    """The kernel of a workload with a plan; plan None: the untuned kernel. Raises ValueError or UserError for what the
    builder refuses."""
    made_for = target(kind, arch)
    return made_for.build(workload, made_for.archs[0], KERNEL, plan)


def build(workload, plan, kind: str, arch: str, folder: Path) -> Candidate:
    """Compiles a candidate into the new folder `folder`. plan: a plan's dataclass, None for the untuned kernel. Raises
    what `make` raises, and ValueError for a kernel that the arch cannot run."""
    func = make(workload, plan, kind, arch)
    code = _compile(func, kind, arch, folder)
    if any(0 in step.get("grid", ()) for step in code["steps"]):
        raise ValueError("the plan's tiles are larger than the work: there would be no workgroups")
    return write(folder, {"workload": json.loads(workload.text)} | _plan_facts(plan) | code | work(workload, func))


def _compile(func, kind: str, arch: str, folder: Path) -> dict:
    """Compiles a kernel into the new folder `folder`. Returns the fields of candidate.json that describe the code."""
    made_for = target(kind, arch)
    folder.mkdir(parents=True, exist_ok=True)
    library, launches = made_for.compile_arch(made_for.archs[0], {KERNEL: func}, folder)
    return {"api": kind, "arch": arch, "code": library, "needs": made_for.archs[0].needs} | launches[KERNEL]


def build_copy(arch: str, folder: Path) -> Candidate:
    """A candidate that copies memory, for target vulkan. Its bandwidth is the reference for the rates of other
    candidates. Its bytes are those that it reads and those that it writes."""
    from mlc_amd.compiler.codegen.vulkan_target import COPY_BYTES
    from mlc_amd.schedules.gpu.base.probes import copy

    words = COPY_BYTES // 4
    params = [{"name": name, "shape": [words], "dtype": "uint32", "role": "work"} for name in "XY"]
    traffic = {"bytes": 2 * COPY_BYTES, "flops": 0}
    case = {"name": "d0", "state": [0, 1, 0, 0]} | traffic
    about = {"workload": {"op": "copy", "args": {"words": words}}, "plan": None, "params": params, "cases": [case]}
    code = _compile(copy(words, target("vulkan", arch).archs[0], KERNEL), "vulkan", arch, folder)
    return write(folder, about | code | {"states": []} | traffic)


def build_bounds(workload, arch: str, folder: Path) -> tuple[Candidate, dict[str, list[Candidate]]]:
    """For target cpu: (the untuned kernel, {kind: kernels whose times are lower bounds}), see
    schedules/cpu/base/bound.py."""
    from mlc_amd.schedules.cpu.base.bound import bounds

    untuned = build(workload, None, "cpu", arch, folder / "untuned")

    def made(func, place: Path) -> Candidate:
        return write(place, untuned.facts | _compile(func, "cpu", arch, place))

    isa = target("cpu", arch).archs[0].isa
    found = bounds(untuned.params, workload, isa, KERNEL)
    return untuned, {
        kind: [made(func, folder / f"{kind}-{i}") for i, func in enumerate(funcs)] for kind, funcs in found.items()
    }


def _plan_facts(plan) -> dict:
    """A plan and its type as JSON values; `plan_of` is the inverse."""
    if plan is None:
        return {"plan": None}
    kind = type(plan)
    return {"plan": asdict(plan), "plan_type": [kind.__module__, kind.__qualname__]}


def plan_of(facts: dict):
    """The plan in the facts of a candidate.json; None for the untuned kernel."""
    if facts["plan"] is None:
        return None
    module, name = facts["plan_type"]
    return getattr(importlib.import_module(module), name)(**facts["plan"])


# ---- in worker processes


def folder_name(workload, plan) -> str:
    """The name of a candidate's folder."""
    if plan is None:
        return f"{workload.key}-untuned"
    text = json.dumps(asdict(plan), sort_keys=True)
    return f"{workload.key}-{hashlib.sha256(text.encode()).hexdigest()[:10]}"


class Builder(Closing):
    """Worker processes that build candidates for one target and arch, in folders below `root`. A context manager.

    workers: number of processes, by default one for each core. timeout: seconds for a build. memory: bytes for a
    worker.
    """

    def __init__(
        self,
        kind: str,
        arch: str,
        root: Path,
        workers: int | None = None,
        timeout: float = TIMEOUT,
        memory: int = MEMORY,
    ):
        self.kind, self.arch, self.root, self.timeout = kind, arch, Path(root), timeout
        self._children = Children(MODULE, workers or available_threads(), (str(memory),))

    def close(self) -> None:
        self._children.close()

    def build(self, jobs, progress=lambda done, total: None) -> list[Path | str]:
        """The folder of each (workload, plan), or a message why it could not be built."""
        futures = [self._children.ask(self._request(workload, plan), self.timeout) for workload, plan in jobs]
        for done, _ in enumerate(as_completed(futures), 1):
            progress(done, len(futures))
        return [self._built(workload, plan, future) for (workload, plan), future in zip(jobs, futures, strict=True)]

    def _folder(self, workload, plan) -> Path:
        return self.root / folder_name(workload, plan)

    def _request(self, workload, plan) -> dict:
        place = [self.kind, self.arch, str(self._folder(workload, plan))]
        return {"workload": json.loads(workload.text), "place": place} | _plan_facts(plan)

    def _built(self, workload, plan, future) -> Path | str:
        try:
            return future.result()["error"] or self._folder(workload, plan)
        except ChildDied as e:
            return f"building it {e}"


def _handle(request: dict, answer) -> None:
    error, (kind, arch, folder) = None, request["place"]
    try:
        build(from_json(request["workload"]), plan_of(request), kind, arch, Path(folder))
    except (UserError, MemoryError, ValueError, RuntimeError) as e:
        error = f"{type(e).__name__}: {e}".splitlines()[0]
    answer({"error": error})


if __name__ == "__main__":
    import sys

    resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]), int(sys.argv[1])))
    os.nice(5)  # lower priority than measurements at the same time, and than the user's programs
    serve(_handle)
