"""`mlc-amd selftest`'s first part without a GPU: the kernels of an artifact for Vulkan, of whatever profile, in the
emulator (`spirv/emulator.py`) against numpy. Small models take minutes, large ones hours.

    python -m tests.dev.spirv_selftest ARTIFACT [WORD ..] [--runs 1]

Kernels whose names contain one of the words. It says what `selftest` says, and what each kernel must not do.
"""

import argparse
import sys
import time
from contextlib import closing

import numpy as np

from mlc_amd.runtime.artifact.artifact import Artifact
from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.gpu.base import profiles
from mlc_amd.tools.checks.selftest_kernels import Check, candidate_of, in_turn
from mlc_amd.tools.reference.operators import has_reference
from mlc_amd.tools.reference.plan import layout_of
from mlc_amd.tools.terminal import display
from tests.dev.spirv.emulator import Fault, Kernel


class EmulatedBackend:
    """See runtime/measure/timing.py; nothing is timed."""

    name, facts, noise, target = "SPIR-V emulator", {"device": "SPIR-V emulator"}, 0.0, 0.0

    def __init__(self, wave: int, unit: str) -> None:
        self.wave, self.unit, self.cache = wave, unit, 0
        self._memory: dict = {}

    def open(self, sizes: dict) -> None:
        self._memory = {key: np.zeros(nbytes, np.uint8) for key, nbytes in sizes.items()}

    def put(self, key, array: np.ndarray) -> None:
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self._memory[key][: len(raw)] = raw

    def get(self, key, nbytes: int) -> bytes:
        return self._memory[key][:nbytes].tobytes()

    def load(self, candidates) -> list:
        return [self._kernels(candidate) for candidate in candidates]

    def _kernels(self, candidate) -> dict:
        code = candidate.code.read_bytes()
        places = {step["symbol"]: step["code"] for step in candidate.steps}
        return {symbol: Kernel(code[at : at + nbytes], self.wave, self.unit) for symbol, (at, nbytes) in places.items()}

    def bind(self, handle: dict, candidate, keys) -> list:
        memory = [self._memory[key] for key in keys]
        return [
            (handle[step["symbol"]], step["grid"], [memory[i] for i in step["args"]], step["table"])
            for step in candidate.steps
        ]

    def run(self, calls) -> float:
        begun = time.perf_counter()
        for call in calls:
            for kernel, grid, memory, table in call:
                kernel.launch(grid, memory, table)
        return time.perf_counter() - begun

    def close(self) -> None:
        pass


def check(artifact: Artifact, words: list[str], runs: int) -> int:
    """Prints a line for each kernel; how many are wrong."""
    target, wrong = artifact.manifest["target"], 0
    arch = target.get("archs", [])[0]
    backend = EmulatedBackend(target.get("needs", {})[arch]["subgroup_size"], profiles.resolve(arch).lane_unit)
    kernels: list = [one for one in artifact.manifest["kernels"] if not words or any(w in one["name"] for w in words)]
    for entry in in_turn(kernels):
        if not has_reference(entry["operator"]):
            continue
        begun = time.perf_counter()
        try:
            found = Check(backend, candidate_of(artifact, entry, arch)).result(layout_of(artifact), runs)
        except Fault as fault:
            found = {"deviation": None, "problem": str(fault)}
        wrong += bool(found["problem"])
        deviation = "" if found["deviation"] is None else f"{found['deviation']:.3f}"
        seconds = time.perf_counter() - begun
        print(f"{entry['name']:44} {deviation:>6} {found['problem'] or 'ok'} ({seconds:.1f} s)", flush=True)
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("artifact")
    parser.add_argument("words", nargs="*")
    parser.add_argument("--runs", type=int, default=1, help="of kernels whose workgroups meet")
    options = parser.parse_args()
    try:
        with closing(Artifact.open(options.artifact)) as artifact:
            if artifact.manifest["target"]["kind"] != "vulkan":
                raise UserError(f"{options.artifact} is not for Vulkan")
            return 1 if check(artifact, options.words, options.runs) else 0
    except UserError as error:
        display.message(f"error: {error}")
        return 1


if __name__ == "__main__":
    sys.exit(main())
