"""The gate: no plan enters the database before its kernel has computed what the untuned one computes.

In: two candidates of one workload. Out: a `Checked`: where ("device", "lavapipe"; "" if nowhere), whether they agree,
the worst difference as a share of what `runtime/measure/compare.py` allows. Both run on the same inputs, in several
states: those that kernels are timed in, and a part of the tokens behind others. On a device the second one runs several
times, for a race may be won once.

For GPUs that are not here `Static` can ask a program that emulates them. That is slow, so smaller matrices with the
same plan stand for large ones.
"""

from pathlib import Path

from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.measure.candidate import Candidate, read
from mlc_amd.schedules.tuning.database import Checked
from mlc_amd.schedules.tuning.workload import Workload

EMULATED = 900.0  # seconds that an emulator may take
SMALL = {"n": 256, "vocab": 256}  # for an emulator
TOKENS = (128, 256, 512)  # for an emulator; the first that the plan's tiles divide
NOWHERE = "there is no {} here to run it on"


def check(session, untuned: Path, tuned: Path) -> Checked:
    """Compares on the session's device. Never passes what nothing has computed."""
    candidate = read(tuned)
    try:
        facts = session.start(candidate)
    except UserError as e:
        return Checked("", False, error=str(e))
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


# ---- without a device


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
