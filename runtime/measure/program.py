"""The measuring program: a child process that loads candidates, times them and compares them; `session.py` is its other side.

In, one JSON line each: {"open": folder, "device"} opens the device that serves this candidate; {"measure": [folders of one group],
"together": whether they load at once}; {"compare": [untuned, tuned], "states": [[4 int], ..]}. Out, JSON lines; the last one of an answer
has "done". Before each thing that may crash comes {"doing": [folders]}.
"""

import importlib

import numpy as np

from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.measure import bench, compare
from mlc_amd.runtime.measure.candidate import read
from mlc_amd.runtime.measure.child import serve

BACKENDS = {"vulkan": "VulkanBackend", "rocm": "HipBackend", "cpu": "CpuBackend"}
MODULES = {"vulkan": "vulkan", "rocm": "hip", "cpu": "cpu"}


def open_backend(candidate, device: str | None = None):
    """The device for a candidate. UserError if there is none here."""
    if candidate.api not in BACKENDS:
        raise UserError(f"this version cannot measure kernels of target '{candidate.api}'; use a newer mlc-amd")
    module = importlib.import_module(f"mlc_amd.runtime.measure.{MODULES[candidate.api]}")
    return getattr(module, BACKENDS[candidate.api])(device, candidate)


class Program:
    """Keeps the device open between requests."""

    def __init__(self):
        self.backend = None

    def handle(self, request: dict, answer) -> None:
        for name in ("open", "measure", "compare"):
            if name in request:
                getattr(self, f"_{name}")(request, answer)

    def _open(self, request: dict, answer) -> None:
        self.backend = open_backend(read(request["open"]), request["device"])
        copied = self.backend.copy_bandwidth() if hasattr(self.backend, "copy_bandwidth") else 0.0
        answer({"done": True, "facts": self.backend.facts | {"copy_bandwidth": copied}})

    def _measure(self, request: dict, answer) -> None:
        folders = request["measure"]
        parts = [folders] if request["together"] else [[folder] for folder in folders]
        for part in parts:
            answer({"doing": part})
            made = bench.Bench(self.backend, [read(folder) for folder in part])
            for i, error in made.failures.items():
                answer({"result": {"error": error}, "folder": part[i]})
            made.measure(
                lambda i, part=part: answer({"doing": [part[i]]}),
                lambda i, result, part=part: answer({"result": result | {"error": None}, "folder": part[i]}),
            )
        answer({"done": True})

    def _compare(self, request: dict, answer) -> None:
        answer({"done": True} | compare_candidates(self.backend, *map(read, request["compare"]), request["states"]))


def compare_candidates(backend, untuned, tuned, states) -> dict:
    """{"error": worst difference as a share of what is allowed, "wrong": [what is wrong]} on the inputs of each state."""
    if untuned.group != tuned.group:
        return {"error": None, "wrong": ["the two kernels do not have the same parameters"]}
    made = bench.Bench(backend, [untuned, tuned])
    if made.failures:
        return {"error": None, "wrong": list(made.failures.values())}
    errors, wrong = [], []
    for state in states:
        share, why = compare.differences(tuned, state, *(made.outputs(i, state) for i in range(2)))
        errors.append(share)
        wrong += [f"{text} (state {state[:2]})" for text in why]
    worst = max(errors)
    return {"error": worst if np.isfinite(worst) else None, "wrong": wrong}


if __name__ == "__main__":
    serve(Program().handle)
