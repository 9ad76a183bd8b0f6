"""A whole model on this machine's device: the second part of `mlc-amd selftest`.

In: an artifact and the device that it is loaded on. Out: whether replays of what was recorded or captured give what
launches one by one do (`replays`), whether the model's logits are those of numpy (`logits`) and those of its own other
functions (`agreement`), and the times of kernels (`times`).
"""

from collections.abc import Callable

import numpy as np

from mlc_amd.runtime.errors import UserError
from mlc_amd.tools import kernel_table
from mlc_amd.tools.reference.plan import Plan, without_reference

DECODED = 4  # tokens, one by one
PROMPT = 40  # tokens of a prefill step, at most
# Of logits: the root of the mean square of the differences, as a share of the same of the logits' distances from their
# mean. Int8 activations that round to the other side are common after some layers and add up to 3 % in the bundled
# model; a wrong kernel or launch list changes logits altogether.
TOLERANCE = 0.1
LARGEST = 64 << 20  # bytes of weights that numpy computes unasked: a billion operations or two
TIMED_DEPTH = 64  # tokens in the cache when kernels are timed

ROUTERS = ("route", "norm_route")

Step = tuple[str, int, np.ndarray]  # function, position, ids


def steps(artifact, most: int) -> list[Step]:
    """A sequence in which each function has its turn: prompts of at most `most` tokens, a few single tokens, all
    logits. Where the context is full, positions are written again."""
    manifest, random = artifact.manifest, np.random.default_rng(1)
    functions, found, position = manifest["functions"], [], 0
    for name in sorted(functions, key=lambda name: (functions[name]["all_logits"], -functions[name]["tokens"])):
        count = min(functions[name]["tokens"], most)
        for _ in range(DECODED if count == 1 else 1):
            position = min(position, manifest["context"] - count)
            found.append((name, position, random.integers(0, manifest["model"]["vocab"], count)))
            position += count
    return found


def _run(device, functions: dict, sequence: list[Step], run: Callable[[str], None]) -> list[np.ndarray]:
    """Logits of each step, from an empty cache. run: the device's `run` or `run_plain`."""
    device.clear()
    found = []
    for function, position, ids in sequence:
        device.write("state", (position, len(ids)))
        device.write("tokens", ids)
        run(function)
        found.append(device.read("logits", len(ids) if functions[function]["all_logits"] else 1).copy())
    return found


def replays(device, artifact, rounds: int) -> dict:
    """{"rounds", "functions", "wrong"}: functions whose replays differ, bit for bit, from launches one by one, in any
    of the rounds of the same sequence of steps.

    Steps have as many tokens as their function takes. Rows that are not in use hold what is left of other steps, and
    they may decide with the others when attention rescales its sums, which changes how these round.
    """
    functions = artifact.manifest["functions"]
    sequence = steps(artifact, max(function["tokens"] for function in functions.values()))
    expected, wrong = _run(device, functions, sequence, device.run_plain), set()
    for _ in range(rounds):
        for (function, *_), found, wanted in zip(
            sequence, _run(device, functions, sequence, device.run), expected, strict=True
        ):
            if found.tobytes() != wanted.tobytes():
                wrong.add(function)
    return {"rounds": rounds, "functions": sorted({function for function, *_ in sequence}), "wrong": sorted(wrong)}


def logits(device, artifact, always: bool = False) -> dict:
    """{"steps": [{"function", "position", "tokens", "deviation"}], "problem", "note"}: the model's logits against those
    of numpy, as shares of what is allowed; `note` says why they were not compared. always: also those of a model so
    large that numpy takes minutes."""
    none = {"steps": [], "problem": None}
    if missing := without_reference(artifact):
        return none | {"note": f"no reference for {', '.join(missing[:3])}"}
    if artifact.manifest["weight_bytes"] > LARGEST and not always:
        return none | {"note": "the model is large: --whole-model compares its logits, which takes minutes"}
    plan, sequence, vocab = Plan(artifact), steps(artifact, PROMPT), artifact.manifest["model"]["vocab"]
    found, told = _run(device, artifact.manifest["functions"], sequence, device.run), []
    for (function, position, ids), rows in zip(sequence, found, strict=True):
        deviation = _apart(rows[:, :vocab], plan.run(function, position, ids))
        told.append({"function": function, "position": position, "tokens": len(ids), "deviation": deviation})
    wrong = _wrong(told, mixture=any(entry["operator"] in ROUTERS for entry in artifact.manifest["kernels"]))
    problem = f"logits of {', '.join(wrong)} are wrong" if wrong else None
    return {"steps": told, "problem": problem, "note": None}


def _wrong(told: list[dict], mixture: bool) -> list[str]:
    """The functions with wrong logits. mixture: of experts, where rounding may change a token's choice of experts, and
    so its logits: those of a function are wrong if they are in most of its steps, or if it has one step, in most
    of all."""
    deviations: dict[str, list[float]] = {}
    for step in told:
        deviation = np.inf if step["deviation"] is None else step["deviation"]
        deviations.setdefault(step["function"], []).append(deviation)
    if mixture and np.median([deviation for found in deviations.values() for deviation in found]) <= 1:
        return [name for name, found in deviations.items() if len(found) > 1 and np.median(found) > 1]
    return [name for name, found in deviations.items() if max(found) > 1]


def agreement(engine) -> dict:
    """{"deviation", "problem"}: the logits of the same tokens, computed by prefill and decode and by the function that
    gives all: different kernels of one model."""
    count = min(PROMPT, engine.context)
    ids = np.random.default_rng(2).integers(0, engine.vocab, count)
    engine.reset()
    rows = [engine.prefill(ids[: count - DECODED]), *(engine.decode(token) for token in ids[count - DECODED :])]
    engine.reset()
    deviation = _apart(np.array(rows), engine.score(ids)[count - DECODED - 1 :])
    engine.reset()
    fine = deviation is not None and deviation <= 1
    problem = None if fine else "decode and prefill give other logits than the function for all logits"
    return {"deviation": deviation, "problem": problem}


def _apart(found: np.ndarray, expected: np.ndarray) -> float | None:
    """How far logits [rows, vocab] are apart, as a share of TOLERANCE; None where they are not finite."""
    if not np.isfinite(found).all():
        return None
    spread = float(np.sqrt(((expected - expected.mean(-1, keepdims=True)) ** 2).mean()))
    return float(np.sqrt(((found - expected) ** 2).mean())) / (TOLERANCE * max(spread, 1e-30))


def times(engine, rounds: int) -> dict[str, dict]:
    """By kernel, "us", "gbps" and "tops" of a call in the model, in the first of its functions that are timed; empty
    where the device cannot time kernels."""
    found: dict[str, dict] = {}
    functions = engine.artifact.manifest["functions"]
    for size in sorted(f["tokens"] for f in functions.values() if not f["all_logits"]):
        depth = min(TIMED_DEPTH, engine.context - size)
        engine.reset()
        if depth:
            engine.advance(np.zeros(depth, np.int64))
        try:
            table = kernel_table.measure(engine, np.arange(size) % engine.vocab, None, rounds)
        except UserError:  # a driver without timestamps
            return {}
        for row in table["kernels"]:
            known = {"function": table["function"], "depth": depth}
            found.setdefault(row["kernel"], known | {key: row[key] for key in ("us", "gbps", "tops")})
    engine.reset()
    return found
