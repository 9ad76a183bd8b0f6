"""How well the static model ranks plans, against measurements:

    python -m tests.dev.static_correlation KIT_OR_DATABASE [...] [--plans]

In: folders of kits that came back (kit.json, results.json), or of databases (measurements.jsonl). Out: for each
workload Spearman's rank correlation between predicted and measured seconds of its plans; the same for the plans that
the compiler asked here keeps in registers ("no spills": elsewhere another compiler may do better); what the plan that
the model would choose gains over the default, as predicted and as measured. Operators' means follow; of all pairs of a
workload's plans without spills where the model promises a gain of so much, how many are faster in truth; and the
correlation over all workloads' default plans.

The model is of AMD GPUs. For measurements on NVIDIA's, whose instructions no tool here shows, it takes the kernels' own
SPIR-V as RADV compiles it for RDNA3, and HOPPER's constants: a proxy, since registers, instructions and their order are
another compiler's. Cooperative matrices need a RADV that knows them (Mesa 25).
"""

import argparse
import json
import tempfile
from dataclasses import dataclass, replace
from math import nan
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mlc_amd.compiler.tuning import isa_costs, lines
from mlc_amd.compiler.tuning.build import Builder, plan_of
from mlc_amd.compiler.tuning.database import HEADER, LOG, entries_of
from mlc_amd.compiler.tuning.static import codes_of, of_candidate
from mlc_amd.runtime.artifact import json_files
from mlc_amd.runtime.measure.candidate import read
from mlc_amd.schedules.gpu.base import arch as archs
from mlc_amd.schedules.gpu.base import profiles
from mlc_amd.schedules.space import space

LEAST = 3  # plans of a workload: with fewer a rank says nothing
PROMISES = (0.1, 0.25, 0.4)  # gains
ASSUMED = "rdna3"


@dataclass(frozen=True)
class Sm(isa_costs.Machine):
    """A streaming multiprocessor as a compute unit with four SIMDs of 512 registers a lane and 16 waves; 228 KiB of
    shared memory."""

    def held(self, kernel, threads):
        waves = -(-threads // kernel.wave)
        limits = {"waves": 16, "vgprs": 512 // (-(-max(kernel.vgprs, 1) // 8) * 8)}
        if kernel.lds:
            limits["lds"] = -(-(228 << 10) // kernel.lds * waves // 4)
        limit = min(limits, key=lambda name: limits[name])
        return limits[limit], limit


# Peak rates: NVIDIA's H100 whitepaper (4096 float16 operations a clock and multiprocessor; 32 lanes of float32 a
# quarter of it); latency is an estimate.
_SM = isa_costs.Family(simds=4, lanes=32, scalar=1, memory=128, lds=128, matrix=((r"", 8),), apart=True)
HOPPER = Sm(
    "H200", _SM, units=132, clock=1.8e9, latency=600e-9 * 1.8e9, bandwidth=4.8e12 * isa_costs.EFFICIENCY, gpu=None
)


@dataclass(frozen=True)
class Point:
    """A plan of a workload: measured seconds, and the candidate's folder."""

    workload: Operator
    plan: str
    seconds: float
    folder: Path
    default: bool


class Guess(NamedTuple):
    """Predicted seconds of a point; whether its kernel has registers in memory."""

    seconds: float
    point: Point
    spills: bool


def of_kit(folder: Path) -> tuple[str, str, list[Point]]:
    """(target, arch, measured points)."""
    kit, results = (json.loads((folder / name).read_text()) for name in ("kit.json", "results.json"))
    points = []
    for name, facts in kit["candidates"].items():
        found = results["results"].get(name)
        if found and found["error"] is None:
            candidate = folder / "candidates" / name
            workload = from_json(read(candidate).facts["workload"])
            points.append(
                Point(workload, _short(facts["plan"]), found["seconds"], candidate, name.endswith("-untuned"))
            )
    return kit["target"], kit["arch"], points


def of_database(folder: Path, built: Path) -> tuple[str, str, list[Point]]:
    """As `of_kit`; candidates are built once more, into `built`."""
    header = json_files.read(folder / HEADER, lines.Header, lines.ADVICE)
    kind, arch = header["api"], header["arch"]
    jobs, points = [], []
    for entry in entries_of(lines.read(folder / LOG)[0]):
        found = space(entry.workload, _arch(kind, arch))
        records = [
            record for record in entry.records.values() if record.seconds is not None and record.runner != "static"
        ]
        if found and len(records) >= LEAST:
            jobs += [(entry.workload, found.parse(record.plan), record) for record in records]
    with Builder(kind, arch, built) as builder:
        made = builder.build([(workload, plan) for workload, plan, _ in jobs])
    for (workload, _, record), path in zip(jobs, made, strict=True):
        if isinstance(path, Path):
            points.append(Point(workload, _short(record.plan), record.seconds, path, record.default))
    return kind, arch, points


def _arch(kind: str, name: str):
    return {"rocm": archs.resolve, "vulkan": profiles.resolve}[kind](name)


def _short(plan: dict) -> str:
    return " ".join(f"{name}={value}" for name, value in plan.items())


def predict(kind: str, name: str, points: list[Point]) -> tuple[list[Guess | None], list[str]]:
    """The prediction for each point, None where the model or its compiler cannot; and why not."""
    arch = _arch(kind, name)
    proxy = kind == "vulkan" and not arch.amd
    machine = HOPPER if proxy else isa_costs.machine(arch)
    candidates = [read(point.folder) for point in points]
    compiled = codes_of(candidates, replace(profiles.resolve(ASSUMED), wave=arch.wave) if proxy else arch)
    found, reasons = [], []
    for point, candidate, codes in zip(points, candidates, compiled, strict=True):
        try:
            if isinstance(codes, str):
                raise ValueError(codes)
            spills = any(code.kernel.scratch or code.kernel.vgpr_spills for code in codes)
            one = of_candidate(candidate, codes, point.workload, plan_of(candidate.facts), arch, machine)
            found.append(Guess(one.seconds, point, spills))
        except ValueError as error:
            found.append(None)
            reasons.append(str(error))
    return found, reasons


def spearman(a, b) -> float:
    """Rank correlation; equal values share their mean rank."""
    ranks = [_ranks(np.asarray(x, float)) for x in (a, b)]
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1]) if all(np.ptp(rank) for rank in ranks) else 0.0


def _ranks(values: np.ndarray) -> np.ndarray:
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[place]


def agreement(guesses: list[Guess]) -> float:
    """Spearman of a workload's plans; nan of too few."""
    if len(guesses) < LEAST:
        return nan
    return spearman([guess.seconds for guess in guesses], [guess.point.seconds for guess in guesses])


def kept(guesses: list[Guess], promise: float) -> tuple[int, int]:
    """(pairs of plans of which the model says that one is faster by that much, pairs where it is faster)."""
    pairs = [(a, b) for a in guesses for b in guesses if b.seconds > a.seconds * (1 + promise)]
    return len(pairs), sum(b.point.seconds > a.point.seconds for a, b in pairs)


def report(label: str, kind: str, arch: str, points: list[Point], plans: bool) -> None:
    predicted, reasons = predict(kind, arch, points)
    by_workload: dict[Operator, list[Guess]] = {}
    for guess in filter(None, predicted):
        by_workload.setdefault(guess.point.workload, []).append(guess)
    print(f"{label}: {arch}, {len(points)} measured plans, {len(points) - len(reasons)} predicted")
    for reason in dict.fromkeys(reasons):
        print(f"  {reasons.count(reason)} not: {reason}")
    print(f"{'workload':64} plans  Spearman no spills  us: best   default    choice  its gain: predicted  measured")
    correlations: dict[str, list[tuple[float, float]]] = {}
    promises: dict[str, np.ndarray] = {}
    for workload, guesses in sorted(by_workload.items(), key=lambda pair: pair[0].text):
        if len(guesses) < LEAST:
            continue
        held = [guess for guess in guesses if not guess.spills]
        found = agreement(guesses), agreement(held)
        several = "m=1" if workload.args.get("m", 1) == 1 else "m>1"
        correlations.setdefault(f"{workload.op} {several}", []).append(found)
        for i, promise in enumerate(PROMISES):
            promises.setdefault(f"{workload.op} {several}", np.zeros((len(PROMISES), 2), int))[i] += kept(held, promise)
        chosen = min(guesses, key=lambda guess: (guess.seconds, not guess.point.default))
        default = next(
            (guess for guess in guesses if guess.point.default), Guess(nan, replace(chosen.point, seconds=nan), False)
        )
        measured = min(guess.point.seconds for guess in guesses), default.point.seconds, chosen.point.seconds
        times = " ".join(f"{seconds * 1e6:9.1f}" for seconds in measured)
        gains = f"{default.seconds / chosen.seconds - 1:20.0%} {default.point.seconds / chosen.point.seconds - 1:9.0%}"
        print(f"{name_of(workload):64} {len(guesses):5} {found[0]:9.2f} {found[1]:9.2f}  {times} {gains}")
        for guess in sorted(guesses, key=lambda guess: guess.point.seconds) if plans else []:
            spills = ", spills" if guess.spills else ""
            times = f"{guess.point.seconds * 1e6:9.1f} us measured {guess.seconds * 1e6:9.1f} us predicted"
            print(f"    {times}  {guess.point.plan}{spills}")
    for name, found in correlations.items():
        means = (np.nanmean(column) for column in zip(*found, strict=True))
        print(f"{f'mean of {len(found)}: {name}':70} {' '.join(f'{mean:9.2f}' for mean in means)}")
    for name, counts in promises.items():
        told = ", ".join(f"{p:.0%}: {faster} of {count}" for p, (count, faster) in zip(PROMISES, counts, strict=True))
        print(f"faster in truth, of pairs with a promise of {told}  {name}")
    defaults = [guess for guesses in by_workload.values() for guess in guesses if guess.point.default]
    print(f"{f'default plans of {len(defaults)} workloads':70} {agreement(defaults):9.2f}")


def name_of(workload: Operator) -> str:
    args = workload.args
    if "segments" in args:
        return f"linear {' '.join(f'{fmt}:{n}' for fmt, n in args['segments'])} k={args['k']} m={args['m']}"
    names = ("gate", "fmt", "n", "k", "m", "heads", "d", "ctx", "rows")
    return f"{workload.op} {' '.join(f'{key}={args[key]}' for key in names if key in args)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--tokens", type=int, help="only workloads of so many tokens")
    parser.add_argument("--plans", action="store_true", help="list every plan")
    options = parser.parse_args()
    for folder in options.folders:
        with tempfile.TemporaryDirectory() as built:
            found = of_kit(folder) if (folder / "kit.json").is_file() else of_database(folder, Path(built))
            kind, arch, points = found
            points = [point for point in points if options.tokens in (None, point.workload.args.get("m"))]
            report(str(folder), kind, arch, points, options.plans)


if __name__ == "__main__":
    main()
