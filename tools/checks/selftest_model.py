"""A whole model on this machine's device: the second part of `mlc-amd selftest`.

In: an artifact and the device that it is loaded on. Out: whether replays of what was recorded or captured give what
launches one by one do (`replays`), whether the model's logits are those of numpy (`logits`) and those of its own other
functions (`agreement`), and the times of kernels (`times`). How much is replayed and timed depends on how fast the
model runs here (`pace`), and on the time that there is.
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

DECODED = 4  # tokens, one by one
PROMPT = 40  # tokens of a prefill step, at most
AHEAD = 72  # tokens that are decoded by steps that begin ahead: into a second page
FEW = 8  # tokens, and short sequences, of a step of a model that is slow here
# Of logits: the root of the mean square of the differences, as a share of the same of the logits' distances from their
# mean. Int8 activations that round to the other side are common after some layers and add up to 3 % in the bundled
# model; a wrong kernel or launch list changes logits altogether.
AHEAD_SHARE = 0.05  # of the seconds that are left, for these
TOLERANCE = 0.1
LARGEST = 64 << 20  # bytes of weights that numpy computes unasked: a billion operations or two
TIMED_DEPTH = 64  # tokens in the cache when kernels are timed
TIMED, REPLAYED = 1 / 8, 1 / 3  # of the time that is left, that timing a function and that replays may take

MEASURED = ("us", "gbps", "tops", "bound_us", "bound_by", "bound_share")  # as of kernel_table.measure

ROUTERS = ("route", "norm_route")


class Step(NamedTuple):
    """What `write_step` takes. The long sequence is the chunk, or the first single row of a step without one."""

    function: str
    singles: list[SingleRow]
    chunk: ChunkRows | None

    @property
    def rows(self) -> int:
        return len(self.singles) + (len(self.chunk[0]) if self.chunk else 0)

    @property
    def position(self) -> int:
        """Of the long sequence."""
        return self.chunk[1] if self.chunk else self.singles[0][1]


class Sequences:
    """Sequences that share the pages of a device: short ones of up to a page in slots 0 .. short-1, and a long one in
    the next slot, which has at least half of the pages."""

    def __init__(self, device, manifest: dict):
        self.manifest = manifest
        found, single = pages_of(device, manifest), max(f["single"] for f in manifest["functions"].values())
        cells = found.pop(STATE, single + 1)
        pages = min(found.values(), default=2 * manifest["context"] // manifest["page"])
        self.short = min(single, pages // 2, cells - 1, SLOTS - 1)
        self.room = min(manifest["context"], (pages - self.short) * manifest["page"])  # for the long one

    def steps(self, most: int, short: int = SLOTS) -> list[Step]:
        """Steps in which each function has its turn: chunks of at most `most` tokens, single tokens, mixtures with the
        first `short` of the short sequences. Where a sequence is full, positions are written again."""
        random, vocab = np.random.default_rng(1), self.manifest["model"]["vocab"]
        functions = decoders(self.manifest)
        found, position, age = [], 0, 0

        def order(name: str) -> tuple[bool, int]:
            """Last those that give the logits of all tokens of a chunk."""
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
        """Logits of each step, from an empty cache. run: the device's `run` or `run_plain`."""
        device.clear()
        write_private_pages(device, self.manifest, self.short)
        found = []
        for step in sequence:
            rows = write_step(device, self.manifest["functions"][step.function], step.singles, step.chunk)
            run(step.function)
            found.append(device.read("logits", rows).copy())
        return found


def pace(engine) -> float:
    """Seconds that a token of a prompt takes."""
    ids = np.zeros(min(PROMPT, engine.context), np.int64)
    engine.reset()
    start = time.perf_counter()
    engine.prefill(ids)
    return (time.perf_counter() - start) / len(ids)


def replays(device, artifact, rounds: int, token: float = 0, budget: Budget | None = None) -> dict:
    """{"rounds", "functions", "wrong"}: functions whose replays differ, bit for bit, from launches one by one, in any
    of the rounds of the same sequence of steps. token: seconds of one, as `pace` gives; steps are as large as the
    budget allows, and there are as many of the `rounds`. Rows that are not in use hold what is left of other steps, and
    they may decide with the others when attention rescales its sums, which changes how these round: the sequence runs
    once before results count."""
    functions, budget = decoders(artifact.manifest), budget or Budget()
    sequences, share = Sequences(device, artifact.manifest), Budget(REPLAYED * budget.left)
    longest = max(function["rows"] for function in functions.values())
    sequence: list[Step] = []
    for most, short in ((longest, SLOTS), (PROMPT, SLOTS), (FEW, FEW)):
        sequence = sequences.steps(most, short)
        if 3 * token * sum(step.rows for step in sequence) <= share.left:  # twice launch by launch, and a round
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
    """{"steps": [{"function", "position", "tokens", "deviation"}], "problem", "note"}: the model's logits against those
    of numpy, as shares of what is allowed; `note` says why they were not compared. always: also those of a model so
    large that numpy takes minutes."""
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
    """{"deviation", "problem", "note"}: the logits of the same tokens, computed by prefill and decode and by the
    function that gives all: different kernels of one model. note: why a deviation says nothing. Random weights choose
    experts with little difference between them, so that rounding changes the choice, layer after layer: on an H200, two
    ways of decoding that differ in the last bits of activations gave logits 0.2 of their range apart (GLM 4.7 Flash).
    """
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
    """ "replays", "agreement" and the other parts of a whole model, of an encoder: replays of each function against its
    launches one by one, and the functions against one another. Its vectors are not compared with numpy."""
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
    """{"steps", "problem"}: how many steps began before the one before them was done, none on devices without such, and
    whether other tokens are chosen than by steps one by one. token: seconds of one; fewer steps where the budget wants
    it."""
    engine.reset()
    several = hasattr(engine.device, "stages")  # GPUs, which compute a step for each of two sequences instead
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
    # Where runs one by one differ, it is rounding that decides.
    wrong = found[0] == found[2] != found[1]
    return {"steps": steps - 1, "problem": "steps that begin ahead choose other tokens" if wrong else None}


def _apart(found: np.ndarray, expected: np.ndarray) -> float | None:
    """How far logits [rows, vocab] are apart, as a share of TOLERANCE; None where they are not finite."""
    if not np.isfinite(found).all():
        return None
    spread = float(np.sqrt(((expected - expected.mean(-1, keepdims=True)) ** 2).mean()))
    return float(np.sqrt(((found - expected) ** 2).mean())) / (TOLERANCE * max(spread, 1e-30))


def times(engine, limits: Limits, rounds: int, token: float = 0, budget: Budget | None = None) -> dict[str, dict]:
    """By kernel, MEASURED of a call in the model, in the first of its functions that are timed; empty where the device
    cannot time kernels. limits: of the device. token: seconds of one, as `pace` gives; a function that would take too
    much of the budget is timed less often, or not."""
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
