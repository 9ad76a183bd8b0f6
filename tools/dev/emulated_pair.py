"""Compares two candidates of tuning in the ISA emulator (gfxemu.py): the child program of `Static(emulator=MODULE)`,
run as `python -m mlc_amd.tools.dev.emulated_pair`.

A request is {"compare": [folder of the untuned candidate, folder of the other]}. Its answer is {"error": worst
difference as a share of what is allowed, None if it is not finite; "wrong": [texts]}.
"""

import math
from pathlib import Path

from mlc_amd.compiler.tuning.gate import states
from mlc_amd.runtime.measure import bench, compare, hip
from mlc_amd.runtime.measure.candidate import Candidate, read
from mlc_amd.runtime.measure.child import serve
from mlc_amd.tools.dev import gfxemu, hip_recorder

MODULE = "mlc_amd.tools.dev.emulated_pair"
DEEPEST = 512  # tokens in the cache of the states that are compared


class Recorder(hip_recorder.Recorder):
    def hipEventElapsedTime(self, begin, end):
        return *hip_recorder.OK, 0.0


def outputs(candidate: Candidate, state: list[int]) -> dict:
    """The candidate's outputs, from the device code of `measure` on a stand-in for HIP whose kernels the emulator
    runs."""
    arch, code = candidate.facts["arch"], candidate.code.read_bytes()
    manifest = {"launches": {arch: {"kernel": {"steps": candidate.steps}}}}
    kernels = hip_recorder.emulated(manifest, arch, code, gfxemu.load())
    recorder = Recorder(kernels, ({"gcnArchName": arch.encode()},), memory=1 << 40)
    backend = hip.HipBackend(None, candidate, recorder)
    backend.cache = 1
    made = bench.Bench(backend, [candidate]).outputs(0, state)
    backend.close()  # not after an error, which it would hide: the process ends then
    return made


def answer_request(request: dict, answer) -> None:
    pair = [read(Path(folder)) for folder in request["compare"]]
    errors, wrong = [0.0], []
    for state in (state for state in states(pair[1]) if state[0] <= DEEPEST):
        error, why = compare.differences(pair[1], state, *(outputs(candidate, state) for candidate in pair))
        errors.append(error)
        wrong += [f"{text} (state {state[:2]})" for text in why]
    worst = float(max(errors))
    answer({"error": worst if math.isfinite(worst) else None, "wrong": wrong})


if __name__ == "__main__":
    serve(answer_request)
