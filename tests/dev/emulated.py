"""Verifies plans for AMD GPUs that are not here: the untuned and the tuned kernel run in the ISA emulator (gfxemu.py).

It is slow, so the same plan for a smaller workload stands for a large one; for GPUs that the emulator lacks, the
kernels are built for STAND_IN, which has the same wave size and the same dot product instructions.
"""

import math
import shutil
import tempfile
from pathlib import Path
from typing import Any

from workloads import operator

from mlc_amd.compiler.tuning.build import Builder
from mlc_amd.compiler.tuning.database import Checked
from mlc_amd.runtime.measure import compare, hip, timing
from mlc_amd.runtime.measure.candidate import Candidate, read
from tests.dev import gfxemu, hip_recorder

SMALL = {"n": 256, "vocab": 256}
COLUMNS = 1024  # of a GEMM's weights: steps of its loop are all alike
TOKENS = (128, 256, 512)  # the first that the plan's tiles divide
DEEPEST = 512  # tokens in the cache
STAND_IN = "gfx1100"
KNOWN = ("gfx11", "gfx12", "gfx90a", "gfx94", "gfx95")


def smaller(workload: Operator, tokens: int = TOKENS[0]) -> Operator:
    """Fewer rows, tokens, words and heads, and of GEMMs columns; a GEMV's plan divides its columns among lanes."""
    args: dict[str, Any] = {
        key: min(value, SMALL.get(key, value)) if isinstance(value, int) else value
        for key, value in workload.args.items()
    }
    if "segments" in args:
        args["segments"] = [[fmt, min(n, SMALL["n"])] for fmt, n in args["segments"]]
    if "m" in args:
        args["m"] = min(args["m"], tokens)
    if args.get("m", 1) > 1 and "k" in args:
        args["k"] = min(args["k"], COLUMNS)
    if "kv_heads" in args:
        args |= {"heads": args["heads"] // args["kv_heads"], "kv_heads": 1}
    return operator(workload.op, args)


class Emulator:
    """callable(workload, plan) -> Checked, as `Local` takes it. A context manager. kind, arch: that plans are for."""

    def __init__(self, kind: str, arch: str):
        known = kind == "rocm" and arch.startswith(KNOWN)
        self.where = "emulator (reduced shape" + (")" if known else f", built for {STAND_IN})")
        self.root = Path(tempfile.mkdtemp(prefix="mlc-amd-emulated-"))
        self.builder = Builder("rocm", arch if known else STAND_IN, self.root, 1)

    def __enter__(self) -> "Emulator":
        return self

    def __exit__(self, *_) -> None:
        self.builder.close()
        shutil.rmtree(self.root, ignore_errors=True)

    def __call__(self, workload: Operator, plan) -> Checked:
        error = ""
        for small in dict.fromkeys(smaller(workload, tokens) for tokens in TOKENS):
            untuned, tuned = self.builder.build([(small, None), (small, plan)])
            if isinstance(untuned, Path) and isinstance(tuned, Path):
                return compared(untuned, tuned, self.where)
            error = untuned if isinstance(untuned, str) else str(tuned)
        return Checked("", False, error=error)


def compared(untuned: Path, tuned: Path, where: str = "emulator") -> Checked:
    """Whether two candidates compute the same in the tuned one's states."""
    pair, worst, wrong = (read(untuned), read(tuned)), 0.0, []
    for state in (state for state in pair[1].facts["states"] if state[0] <= DEEPEST):
        error, why = compare.differences(pair[1], state, *(outputs(candidate, state) for candidate in pair))
        worst = max(worst, float(error))
        wrong += [f"{text} (state {state[:3]})" for text in why]
    return Checked(where, not wrong, worst if math.isfinite(worst) else None, "; ".join(wrong))


class _Recorder(hip_recorder.Recorder):
    """HIP's bindings, with kernels in the emulator and no time."""

    def hipEventElapsedTime(self, begin, end):
        return *hip_recorder.OK, 0.0


def outputs(candidate: Candidate, state) -> dict:
    arch, code = candidate.facts["arch"], candidate.code.read_bytes()
    manifest = {"launches": {arch: {"kernel": {"steps": candidate.steps}}}}
    kernels = hip_recorder.emulated(manifest, arch, code, gfxemu.load())
    recorder = _Recorder(kernels, ({"gcnArchName": arch.encode()},), memory=1 << 40)
    backend = hip.HipBackend(None, candidate, recorder)
    backend.cache = 1
    made = timing.Bench(backend, [candidate]).outputs(0, state)
    backend.close()
    return made
