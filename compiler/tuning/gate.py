"""The gate: no plan enters the database before its kernel has computed what the untuned one computes.

In: two candidates of one workload. Out: a `Checked`: where ("device", "lavapipe", "emulator"; "" if nowhere), whether
they agree, the worst difference as a share of what `runtime/measure/compare.py` allows. Both run on the same inputs, in
several states: those that kernels are timed in, and a part of the tokens behind others. On a device the second one runs
several times, for a race may be won once.

Kernels for AMD GPUs that are not here run in the ISA emulator of the tests, where a source checkout and what
tests/gfxemu.py needs are. It is slow, so smaller matrices with the same plan stand for large ones.
"""

import importlib
import math
import os
import shutil
import sys
from pathlib import Path

from mlc_amd.compiler.tuning.build import plan_of
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.measure.candidate import Candidate, read
from mlc_amd.runtime.measure.child import Child, Died, serve
from mlc_amd.schedules.tuning.database import Checked
from mlc_amd.schedules.tuning.workload import Workload

MODULE = "mlc_amd.compiler.tuning.gate"
TESTS = Path(__file__).resolve().parents[2] / "tests"
EMULATED = 900.0  # seconds that the emulator may take
SMALL = {"n": 256, "vocab": 256}  # for the emulator
TOKENS = (128, 256, 512)  # for the emulator; the first that the plan's tiles divide
DEEPEST = 512  # tokens in the cache, for the emulator
NOWHERE = "there is no {} here, and no ISA emulator (a source checkout, TINYGRAD_SRC and clang)"


def check(session, untuned: Path, tuned: Path, builder=None) -> Checked:
    """Compares on the session's device. Without one, kernels of target rocm go to the emulator; builder: makes smaller
    ones for it.

    Never passes what nothing has computed.
    """
    candidate = read(tuned)
    try:
        facts = session.start(candidate)
    except UserError as e:
        if candidate.api != "rocm":
            return Checked("", False, error=str(e))
        return emulated(untuned, tuned, builder)
    answer = session.compare(untuned, tuned, states(candidate))
    where = "lavapipe" if facts["device"].startswith("llvmpipe") else "device"
    return Checked(where, not answer["wrong"], answer["error"], "; ".join(answer["wrong"]), answer["gain"])


def states(candidate: Candidate) -> list[list[int]]:
    """What kernels are compared in: their cases, and fewer tokens than there is room for, behind others."""
    args = candidate.facts["workload"]["args"]
    m, ctx = args.get("m", 1), args.get("ctx", 1 << 30)
    further = [[min(37, ctx - m), max(1, m - 3), 0, 0]] + ([[0, 1, 0, 0]] if "ctx" in args else [])
    found = [case["state"] for case in candidate.cases] + further
    return [list(state) for state in dict.fromkeys(map(tuple, found))]


# ---- the emulator


def emulator() -> bool:
    """Whether the ISA emulator is here, and what it needs."""
    if not (TESTS / "gfxemu.py").is_file() or "TINYGRAD_SRC" not in os.environ or not shutil.which("clang"):
        return False
    try:
        return (_tests_module("gfxemu").FOLDER / "run_hsaco.py").is_file()
    except ImportError:  # of what only developers install
        return False


def _tests_module(name: str):
    if str(TESTS) not in sys.path:
        sys.path.append(str(TESTS))
    return importlib.import_module(name)


def emulated(untuned: Path, tuned: Path, builder=None) -> Checked:
    """Compares in the emulator, in a process of its own."""
    if not emulator():
        return Checked("", False, error=NOWHERE.format(f"GPU for {read(tuned).facts['arch']}"))
    pair = _smaller(untuned, tuned, builder) if builder else None
    child = Child(MODULE)
    try:
        child.send({"compare": list(map(str, pair or (untuned, tuned)))})
        answer = child.receive(EMULATED)
    except Died as e:
        return Checked("emulator", False, error=f"in the emulator it {e}")
    finally:
        child.close()
    return Checked("emulator", not answer["wrong"], answer["error"], "; ".join(answer["wrong"]))


def smaller(workload: Workload, tokens: int = TOKENS[0]) -> Workload:
    """Fewer rows, tokens, words and heads; the columns, which plans divide among lanes, stay."""
    args = {
        key: min(value, SMALL.get(key, value)) if isinstance(value, int) else value
        for key, value in workload.args.items()
    }
    if "segments" in args:
        args["segments"] = [[fmt, min(n, SMALL["n"])] for fmt, n in args["segments"]]
    if "m" in args:
        args["m"] = min(args["m"], tokens)
    if "kv_heads" in args:
        args |= {"heads": args["heads"] // args["kv_heads"], "kv_heads": 1}
    return Workload(workload.op, args)


def _smaller(untuned: Path, tuned: Path, builder) -> tuple[Path, Path] | None:
    """The two candidates of a smaller workload; None where that does not fit the plan."""
    facts = read(tuned).facts
    workload = Workload.from_json(facts["workload"])
    for small in dict.fromkeys(smaller(workload, tokens) for tokens in TOKENS):
        built = builder.build([(small, None), (small, plan_of(facts))])
        if small != workload and not any(error for _, error in built):
            return tuple(folder for folder, _ in built)
    return None


def _compare(request: dict, answer) -> None:
    """In the child: each candidate on a stand-in for HIP whose kernels are the emulator's."""
    hip_recorder, gfxemu = _tests_module("hip_recorder"), _tests_module("gfxemu")
    from mlc_amd.runtime.measure import bench, compare, hip

    class Recorder(hip_recorder.Recorder):
        def hipEventElapsedTime(self, begin, end):
            return *hip_recorder.OK, 0.0

    def outputs(candidate: Candidate, state) -> dict:
        arch, code = candidate.facts["arch"], candidate.code.read_bytes()
        manifest = {"launches": {arch: {"kernel": {"steps": candidate.steps}}}}
        kernels = hip_recorder.emulated(manifest, arch, code, gfxemu.load())
        recorder = Recorder(kernels, ({"gcnArchName": arch.encode()},), memory=1 << 40)
        backend = hip.HipBackend(None, candidate, recorder)
        backend.cache = 1
        made = bench.Bench(backend, [candidate]).outputs(0, state)
        backend.close()  # not after an error, which it would hide: the process ends then
        return made

    pair = [read(folder) for folder in request["compare"]]
    errors, wrong = [0.0], []
    for state in (state for state in states(pair[1]) if state[0] <= DEEPEST):
        error, why = compare.differences(pair[1], state, *(outputs(candidate, state) for candidate in pair))
        errors.append(error)
        wrong += [f"{text} (state {state[:2]})" for text in why]
    worst = float(max(errors))
    answer({"error": worst if math.isfinite(worst) else None, "wrong": wrong})


if __name__ == "__main__":
    serve(_compare)
