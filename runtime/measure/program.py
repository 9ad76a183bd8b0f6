"""The measuring program: a child process that loads, times and compares candidates. `measurer.py` is its parent.

In, one JSON line each: {"open": folder, "device"} opens the device for this candidate; {"measure": [folders of one
group], "together": whether they load at the same time}; {"compare": [untuned, tuned]}; {"interleaved": [folders of one
group]}. Out: JSON lines, the last of which has "done"; and {"doing": [folders]} before everything that may crash.
"""

import importlib

import numpy as np

from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.measure import compare, timing
from mlc_amd.runtime.measure.candidate import read
from mlc_amd.runtime.measure.child import serve

BACKENDS = {"vulkan": ("vulkan", "VulkanBackend"), "rocm": ("hip", "HipBackend"), "cpu": ("cpu", "CpuBackend")}
TIMES = 3  # runs of a compared kernel in each state


def open_backend(candidate, device: str | None = None):
    """Opens the device for a candidate. Raises UserError if this machine has no such device."""
    if candidate.api not in BACKENDS:
        raise UserError(f"this version cannot measure kernels of target '{candidate.api}'; use a newer mlc-amd")
    module, name = BACKENDS[candidate.api]
    return getattr(importlib.import_module(f"mlc_amd.runtime.measure.{module}"), name)(device, candidate)


class MeasureProgram:
    """Answers requests. Keeps the device open between them."""

    def __init__(self):
        self.backend = None

    def handle(self, request: dict, answer) -> None:
        for name in ("open", "measure", "compare", "interleaved"):
            if name in request:
                getattr(self, f"_{name}")(request, answer)

    def _open(self, request: dict, answer) -> None:
        self.backend = open_backend(read(request["open"]), request["device"])
        answer({"done": True, "facts": self.backend.facts})

    def _measure(self, request: dict, answer) -> None:
        folders = request["measure"]
        parts = [folders] if request["together"] else [[folder] for folder in folders]
        for part in parts:
            answer({"doing": part})
            bench = timing.Bench(self.backend, [read(folder) for folder in part])
            for i, error in bench.failures.items():
                answer({"result": {"error": error}, "folder": part[i]})
            bench.measure(
                lambda i, part=part: answer({"doing": [part[i]]}),
                lambda i, result, part=part: answer({"result": result | {"error": None}, "folder": part[i]}),
            )
        answer({"done": True})

    def _compare(self, request: dict, answer) -> None:
        answer({"done": True} | compare_candidates(self.backend, *map(read, request["compare"])))

    def _interleaved(self, request: dict, answer) -> None:
        bench = timing.Bench(self.backend, [read(folder) for folder in request["interleaved"]])
        seconds = [] if bench.failures else np.median(bench.interleaved(), axis=0).tolist()
        answer({"done": True, "failures": list(bench.failures.values()), "seconds": seconds})


def compare_candidates(backend, untuned, tuned) -> dict:
    """Compares TIMES runs of the tuned candidate in each of its states, because a kernel with a race may be right once.
    Returns {"deviation": largest difference as a share of the tolerance, "error": what is wrong, "gain": `Bench.gain`,
    None if there is an error}."""
    nothing = {"deviation": None, "gain": None}
    if untuned.group != tuned.group:
        return nothing | {"error": "the two kernels do not have the same parameters"}
    bench = timing.Bench(backend, [untuned, tuned])
    if bench.failures:
        return nothing | {"error": "; ".join(bench.failures.values())}
    worst, wrong = 0.0, []
    for state in tuned.facts["states"]:
        expected, failed = bench.outputs(0, state), []
        for time in range(TIMES):
            share, why = compare.differences(tuned, state, expected, bench.outputs(1, state, again=time > 0))
            worst = max(worst, share)
            failed += [why] if why else []
        if failed:
            part = f", in {len(failed)} of {TIMES} runs: a race?" if len(failed) < TIMES else ""
            where = f"state {state[:3]}{part}"
            wrong += [f"{text} ({where})" for text in failed[0]]
    gain = None if wrong else bench.gain()
    return {"deviation": float(worst) if np.isfinite(worst) else None, "error": "; ".join(wrong), "gain": gain}


if __name__ == "__main__":
    serve(MeasureProgram().handle)
