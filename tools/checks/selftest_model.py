"""The second part of `mlc-amd selftest`: a whole model on this machine's device.

In: an artifact and the device on which it is loaded. Out: `replays`: whether replays of recorded or captured launches
have the same results as single launches; `logits`: whether the model's logits agree with numpy's; `agreement`: whether
they agree with those of the model's other functions; `times`: the times of kernels. How much is replayed and timed
depends on the model's speed (`pace`), and on the remaining time.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from mlc_amd.runtime.artifact.io_names import SLOTS
from mlc_amd.runtime.artifact.manifest import decoders, is_draft
from mlc_amd.runtime.cache.pages import STATE
from mlc_amd.runtime.cache.sequence import ChunkRows, SingleRow
from mlc_amd.runtime.devices.steps import pages_of, write_private_pages, write_step
from mlc_amd.runtime.engine.encoder import Encoder
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.gpus import Limits
from mlc_amd.tools.checks.selftest_limits import Budget
from mlc_amd.tools.measure import kernel_table
from mlc_amd.tools.reference.plan import plan_of, without_reference

DECODED = 4  # tokens that are decoded one by one
PROMPT = 40  # largest number of tokens of a prefill step
AHEAD = 72  # tokens that are decoded by steps that start ahead; they reach the second page
FEW = 8  # if the model is slow here: tokens, and short sequences, of a step
AHEAD_SHARE = 0.05  # share of the remaining seconds for steps that start ahead
# Tolerance of logits: the root mean square of the differences, relative to the standard deviation of the logits. After
# several layers it is normal that some int8 activations round to the other side; this adds up to 3 % in the bundled
# model. A wrong kernel or launch list changes logits completely.
TOLERANCE = 0.1
LARGEST = 64 << 20  # bytes of weights for which numpy computes logits by default: one or two billion operations
TIMED_DEPTH = 64  # tokens in the cache when kernels are timed
TIMED, REPLAYED = 1 / 8, 1 / 3  # shares of the remaining time: for timing one function, and for replays

MEASURED = ("us", "gbps", "tops", "bound_us", "bound_by", "bound_share")  # fields of kernel_table.measure

ROUTERS = ("route", "norm_route")


class Step(NamedTuple):
    """The arguments of `write_step`. The long sequence is the chunk, or the first single row in a step without a
    chunk."""

    function: str
    singles: list[SingleRow]
    chunk: ChunkRows | None

    @property
    def rows(self) -> int:
        return len(self.singles) + (len(self.chunk[0]) if self.chunk else 0)

    @property
    def position(self) -> int:
        """The position of the long sequence."""
        return self.chunk[1] if self.chunk else self.singles[0][1]


class Sequences:
    """Sequences that share the pages of a device. Short ones, of up to a page, are in slots 0 .. short-1. A long one is
    in the next slot, and has at least half of the pages."""

    def __init__(self, device, manifest: dict):
        self.manifest = manifest
        found, single = pages_of(device, manifest), max(f["single"] for f in manifest["functions"].values())
        cells = found.pop(STATE, single + 1)
        pages = min(found.values(), default=2 * manifest["context"] // manifest["page"])
        self.short = min(single, pages // 2, cells - 1, SLOTS - 1)
        self.room = min(manifest["context"], (pages - self.short) * manifest["page"])  # for the long one

    def steps(self, most: int, short: int = SLOTS) -> list[Step]:
        """Steps that use each function: chunks of at most `most` tokens, single tokens, and mixtures with the first
        `short` short sequences. When a sequence is full, positions are written again."""
        random, vocab = np.random.default_rng(1), self.manifest["model"]["vocab"]
        functions = decoders(self.manifest)
        found, position, age = [], 0, 0

        def order(name: str) -> tuple[bool, int]:
            """Sorts functions that compute the logits of all tokens of a chunk to the end."""
            function = functions[name]
            return function["logits"] > 1 and not function["single"], -function["rows"]

        for name in sorted(functions, key=order):
            rows, single = functions[name]["rows"], functions[name]["single"]
            for _ in range(DECODED if rows == 1 else 1):
                count = min(rows - min(single, self.short), most, self.room) if rows > single else 1
                position = min(position, self.room - count)
                ids = random.integers(0, vocab, count)
                long = [(int(ids[0]), position, self.short)] if rows == single else []
                others = range(min(single - len(long), self.short, short))
                singles = [*long, *((int(random.integers(vocab)), age, slot) for slot in others)]
                found.append(Step(name, singles, None if long else ChunkRows(ids, position, self.short)))
                position, age = position + count, min(age + bool(others), self.manifest["page"] - 1)
        return found

    def run(self, device, sequence: list[Step], run: Callable[[str], None]) -> list[np.ndarray]:
        """The logits of each step, beginning with an empty cache. run: the device's `run` or `run_plain`."""
        device.clear()
        write_private_pages(device, self.manifest, self.short)
        found = []
        for step in sequence:
            rows = write_step(device, self.manifest["functions"][step.function], step.singles, step.chunk)
            run(step.function)
            found.append(device.read("logits", rows).copy())
        return found


def pace(engine) -> float:
    """The seconds that a token of a prompt takes."""
    ids = np.zeros(min(PROMPT, engine.context), np.int64)
    engine.reset()
    start = time.perf_counter()
    engine.prefill(ids)
    return (time.perf_counter() - start) / len(ids)


def replays(device, artifact, rounds: int, token: float = 0, budget: Budget | None = None) -> dict:
    """Compares replays with single launches. Returns {"rounds", "functions", "wrong"}: the functions whose replays
    differ in any bit, in any round of the same sequence of steps. token: seconds of a token (`pace`). Steps are as
    large, and `rounds` as many, as the time allows. Unused rows contain remains of other steps, and may influence when
    attention rescales its sums, which changes rounding. So the sequence runs once before results count."""
    functions, budget = decoders(artifact.manifest), budget or Budget()
    sequences, share = Sequences(device, artifact.manifest), Budget(REPLAYED * budget.left)
    longest = max(function["rows"] for function in functions.values())
    sequence: list[Step] = []
    for most, short in ((longest, SLOTS), (PROMPT, SLOTS), (FEW, FEW)):
        sequence = sequences.steps(most, short)
        # two runs by single launches, and a round of replays
        if 3 * token * sum(step.rows for step in sequence) <= share.left:
            break
    _, expected = (sequences.run(device, sequence, device.run_plain) for _ in range(2))
    wrong, done = set(), 0
    while done < rounds and not (done and share.over):
        for step, found, wanted in zip(sequence, sequences.run(device, sequence, device.run), expected, strict=True):
            if found.tobytes() != wanted.tobytes():
                wrong.add(step.function)
        done += 1
    return {"rounds": done, "functions": sorted({step.function for step in sequence}), "wrong": sorted(wrong)}


def logits(device, artifact, always: bool = False) -> dict:
    """Compares the model's logits with numpy's. Returns {"steps": [{"function", "position", "tokens", "deviation"}],
    "problem", "note"}, with deviations as shares of the tolerance. note: why they were not compared. always: also for a
    model so large that numpy takes minutes."""
    none = {"steps": [], "problem": None}
    if missing := without_reference(artifact):
        return none | {"note": f"no reference for {', '.join(missing[:3])}"}
    if artifact.manifest["weight_bytes"] > LARGEST and not always:
        return none | {"note": "the model is large: --whole-model compares its logits, which takes minutes"}
    sequences, vocab = Sequences(device, artifact.manifest), artifact.manifest["model"]["vocab"]
    plan = plan_of(artifact, pages_of(device, artifact.manifest))
    sequence = [step for step in sequences.steps(PROMPT) if not is_draft(step.function)]
    found = sequences.run(device, sequence, device.run)
    expected = sequences.run(plan, sequence, plan.run)
    told = []
    for step, rows, wanted in zip(sequence, found, expected, strict=True):
        facts = {"function": step.function, "position": step.position, "tokens": step.rows}
        told.append(facts | {"deviation": _apart(rows[:, :vocab], wanted[:, :vocab])})
    wrong = _wrong(told, mixture=_mixture(artifact.manifest))
    problem = f"logits of {', '.join(wrong)} are wrong" if wrong else None
    return {"steps": told, "problem": problem, "note": None}


def _mixture(manifest: dict) -> bool:
    """Whether the model is a mixture of experts."""
    return any(entry["operator"] in ROUTERS for entry in manifest["kernels"])


def _wrong(told: list[dict], mixture: bool) -> list[str]:
    """The functions with wrong logits. mixture: whether rounding may change a token's choice of experts, and thereby
    its logits. Then a function counts as wrong if most of its steps are wrong; if it has only one step, if most steps
    of all functions are."""
    deviations: dict[str, list[float]] = {}
    for step in told:
        deviation = np.inf if step["deviation"] is None else step["deviation"]
        deviations.setdefault(step["function"], []).append(deviation)
    if mixture and np.median([deviation for found in deviations.values() for deviation in found]) <= 1:
        return [name for name, found in deviations.items() if len(found) > 1 and np.median(found) > 1]
    return [name for name, found in deviations.items() if max(found) > 1]


def agreement(engine) -> dict:
    """Compares the logits of the same tokens by prefill and decode, and by the function that returns all logits, which
    have different kernels. Returns {"deviation", "problem", "note"}. note: why a deviation means nothing. With random
    weights, experts are chosen by small differences, so rounding changes the choice in layer after layer: on an H200,
    two ways of decoding that differ in the last bits of activations gave logits that differ by 0.2 of their range (GLM
    4.7 Flash)."""
    manifest, count = engine.artifact.manifest, min(PROMPT, engine.context)
    ids = np.random.default_rng(2).integers(0, engine.vocab, count)
    engine.reset()
    rows = [engine.prefill(ids[: count - DECODED]), *(engine.decode(token) for token in ids[count - DECODED :])]
    engine.reset()
    deviation = _apart(np.array(rows), engine.score(ids)[count - DECODED - 1 :])
    engine.reset()
    if deviation is not None and (deviation <= 1 or (manifest["weights"] == "random" and _mixture(manifest))):
        note = None if deviation <= 1 else "experts of random weights: the choice depends on rounding"
        return {"deviation": deviation, "problem": None, "note": note}
    problem = "decode and prefill give other logits than the function for all logits"
    return {"deviation": deviation, "problem": problem, "note": None}


def of_encoder(encoder: Encoder, rounds: int) -> dict[str, dict]:
    """The parts "replays", "agreement" and the others, for an encoder: replays of each function are compared with
    single launches, and functions with one another. Its vectors are not compared with numpy."""
    rng, smallest = np.random.default_rng(2), encoder.sizes[0][0]
    lengths = [n for n in (1, 7, PROMPT) if 2 * n <= min(smallest, encoder.context)]
    texts = [rng.integers(0, encoder.vocab, n, np.int32) for n in lengths]

    def compute(name: str, run: Callable[[str], None]) -> np.ndarray:
        return np.concatenate(encoder.step(texts, name, run))

    names = [name for _, name in encoder.sizes]
    found = {name: compute(name, encoder.device.run_plain) for name in names}
    replayed = [(name, compute(name, encoder.device.run)) for name in names for _ in range(rounds)]
    wrong = sorted({name for name, rows in replayed if rows.tobytes() != found[name].tobytes()})
    apart = [_apart(found[name], found[names[0]]) for name in names]
    problem = "its functions compute other vectors" if None in apart or max(one or 0 for one in apart) > 1 else None
    return {
        "replays": {"rounds": rounds, "functions": names, "wrong": wrong},
        "agreement": {"deviation": max(one or 0 for one in apart), "problem": problem, "note": None},
        "ahead": {"steps": 0, "problem": None},
        "times": {},
        "logits": {"steps": [], "problem": None, "note": "none: it is an embedding model"},
    }


def ahead(engine, token: float = 0, budget: Budget | None = None) -> dict:
    """Compares the tokens of steps that start ahead with those of steps one by one. Returns {"steps", "problem"}:
    number of steps that started before the step before them had finished (0 if the device has no such steps). token:
    seconds of a token; there are fewer steps if time is short."""
    engine.reset()
    several = hasattr(engine.device, "stages")  # several GPUs instead compute steps of two sequences at the same time
    with engine.batch(2 if engine.kv_usage.pages > 3 and not several else 1) as batch:
        if not batch.can_start_ahead:
            return {"steps": 0, "problem": None}
        ids = np.random.default_rng(3).integers(0, engine.vocab, (batch.count, 4))
        steps, found, share = min(AHEAD, engine.context - 4), [], AHEAD_SHARE * (budget or Budget()).left
        if 3 * steps * token > share:
            steps = min(steps, FEW)
        for begins_ahead in (False, True, False):
            batch.truncate(0)
            batch.prefill(ids[:, :3])
            found.append(batch.decode(ids[:, 3].tolist(), steps, begins_ahead))
    # If steps one by one differ from one another, rounding is the cause.
    wrong = found[0] == found[2] != found[1]
    return {"steps": steps - 1, "problem": "steps that begin ahead choose other tokens" if wrong else None}


def _apart(found: np.ndarray, expected: np.ndarray) -> float | None:
    """The difference of logits [rows, vocab] as a share of TOLERANCE; None if they are not finite."""
    if not np.isfinite(found).all():
        return None
    spread = float(np.sqrt(((expected - expected.mean(-1, keepdims=True)) ** 2).mean()))
    return float(np.sqrt(((found - expected) ** 2).mean())) / (TOLERANCE * max(spread, 1e-30))


def times(engine, limits: Limits, rounds: int, token: float = 0, budget: Budget | None = None) -> dict[str, dict]:
    """The fields MEASURED of a call, by kernel, in the first timed function that has the kernel. Empty if the device
    cannot time kernels. limits: of the device. token: seconds of a token (`pace`). A function that would take too much
    of the time is timed less often, or not at all."""
    found: dict[str, dict] = {}
    functions, budget = decoders(engine.artifact.manifest), budget or Budget()
    for size in sorted({f["rows"] for f in functions.values() if f["logits"] == 1}):
        depth = min(TIMED_DEPTH, engine.context - size)
        often = int(min(TIMED * budget.left / (token * size), rounds)) if token else rounds
        if not often:
            continue
        engine.reset()
        if depth:
            engine.advance(np.zeros(depth, np.int64))
        try:
            table = kernel_table.measure(engine, np.arange(size) % engine.vocab, limits, often)
        except UserError:  # a driver without timestamps
            return {}
        for row in table["kernels"]:
            known = {"function": table["function"], "depth": depth}
            found.setdefault(row["kernel"], known | {key: row[key] for key in MEASURED})
    engine.reset()
    return found
