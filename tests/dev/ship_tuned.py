"""Makes dist/tuned/<arch>.json, the tuning records that the project ships for GPUs that nobody has measured:

    python -m tests.dev.ship_tuned --cache DIR [--tables DIR] [ARCH ...]

For the kernels of the models below plans are ranked by the static model (compiler/tuning/static.py), but for attention,
which it does not cover. A record is written where it predicts that a plan is faster than the default by `margin`, and
its kernel passes verification in the ISA emulator (see gfxemu.py).
Prints a table of what is predicted for those plans; --tables: for all, and for the best plan that was looked at.

Building every plan of every shape would take days. Linear layers have two steps: a survey of plans at one shape, whose
waves' traces stand for other shapes; and, where it sees half a margin to gain, or has not seen the default, the default
and the most promising plans, built as they are. Of the others the default's neighbors are built.
"""

import argparse
import functools
import itertools
import json
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, fields, replace
from math import inf
from pathlib import Path
from typing import Any

import tvm
from workloads import operator

from mlc_amd.compiler.gguf.synthetic import synthetic
from mlc_amd.compiler.pipeline import make_target
from mlc_amd.compiler.tuning.build import make
from mlc_amd.compiler.tuning.database import SHIPPED, Checked, Database, Measured, Record, file_name, plan_text
from mlc_amd.compiler.tuning.static import Static, combine, run_of
from mlc_amd.compiler.tuning.tasks import CHUNK, extract
from mlc_amd.compiler.work import work
from mlc_amd.schedules.gpu.linear.gemv import Plan
from mlc_amd.schedules.operators import VERSION
from mlc_amd.schedules.space import Space, space
from tests.dev import emulated, gfxemu

ARCHS = {
    "gfx1100": "rocm",
    "gfx1201": "rocm",
    "gfx942": "rocm",
    "gfx1030": "rocm",
    "vangogh": "vulkan",
    "gfx1151": "rocm",
}
MODELS = ("llama3-8b", "llama3-1b", "qwen3-8b", "qwen3-0.6b", "llama2-7b")
FORMATS = ("q4_0", "q4_k", "q6_k", "q8_0")
# Predicted gain over the default that a record needs: more than the model ever predicted wrongly where it could be
# compared (static_correlation.py on an H200: 21 % for a GEMV, 39 % for a GEMM, both slower in truth).
STREAM_MARGIN, MARGIN = 0.25, 0.4
FINALISTS = {1: 2, CHUNK: 2}  # plans of a shape that are built after the survey, by tokens; 1 where nothing is said
BATCH = 30  # builds that are on the disk at a time
SOURCE = "static model of the GPU (compiler/tuning/static.py); nothing was measured on it"
SURVEYED = {"linear": {"n": 4096, "k": 4096}, "gate_up": {"n": 14336, "k": 4096}}


def say(text: str) -> None:
    print(f"# {text}", file=sys.stderr, flush=True)


def linear(fmt: str, rows, k: int, m: int, layout: str, residual: bool) -> Operator:
    segments = [[fmt, n] for n in rows]
    args = {"segments": segments, "k": k, "m": m, "layout": layout, "biases": [False] * len(rows), "residual": residual}
    return operator("linear", args)


def gate_up(fmt: str, n: int, k: int, m: int, layout: str) -> Operator:
    return operator("gate_up", {"gate": fmt, "up": fmt, "n": n, "k": k, "m": m, "layout_in": layout, "layout": layout})


def layout_of(arch, m: int) -> str:
    """The layout of activations, as targets choose it for int8 formats."""
    return {"rocm": "half", "vulkan": "pairs"}[arch.api] if m > 1 and arch.matrix else "rows"


def tasks(presets, formats, kind: str, arch: str) -> dict[Operator, str]:
    """The kernels that have choices, each with the name of the first model's. Formats share their layers' shapes, so
    the first one's tasks are taken for all."""
    first, found = formats[0], {}
    for preset in presets:
        backend = make_target(kind, arch)
        made = extract(synthetic(f"{preset}:{first}"), backend)
        for fmt, task in ((fmt, task) for fmt in formats for task in made):
            workload = from_json(json.loads(task.workload.text.replace(f'"{first}"', f'"{fmt}"')))
            if workload not in found and "attention" not in workload.op and space(workload, backend.archs[0]):
                found[workload] = f"{preset} {task.name.replace(first, fmt)}"
    return found


def margin(workload: Operator) -> float:
    return STREAM_MARGIN if workload.args.get("m") == 1 and workload.op in SURVEYED else MARGIN


# ---- survey


def surveyed(op: str, fmt: str, m: int, arch) -> Operator:
    """The shape whose traces stand for others."""
    sizes, layout = SURVEYED[op], layout_of(arch, m)
    return (
        linear(fmt, [sizes["n"]], sizes["k"], m, layout, True)
        if op == "linear"
        else gate_up(fmt, sizes["n"], sizes["k"], m, layout)
    )


def candidates(found, arch, m: int) -> list:
    """The plans of a space that are surveyed. GEMV: a workgroup's waves change nothing but the grid. GEMM: neighbors of
    the default."""
    if found.plan_type is Plan:
        wide = itertools.product((1, 2, 4), (4,), (arch.wave,), (1, 2))
        plans = [Plan(*values) for values in (*wide, (2, 4, 16, 1))]
    else:
        tile, names = found.default, ("tokens", "rows", "buffers", "threads_m") if m == CHUNK else ("rows", "threads_m")
        plans = steps(found, names)
        if hasattr(tile, "waves_m") and m == CHUNK:  # the same tile cut otherwise, larger ones
            rows, columns = tile.waves_m, tile.waves_n
            changes = [
                {"waves_m": rows * 2, "waves_n": max(1, columns // 2)},
                {"waves_m": max(1, rows // 2), "waves_n": columns * 2},
            ]
            changes += [
                {"tokens": tile.tokens * 2, "waves_m": rows * 2},
                {"rows": tile.rows * 2, "waves_n": columns * 2},
            ]
            plans += [replace(tile, **change) for change in changes]
        plans = [plan for plan in plans if plan.tokens <= emulated.TOKENS[0]]  # those that are soon checked
    return distinct(found, plans)


def steps(found, names) -> list:
    """The default with one of these numbers changed by one choice, if it has it."""
    plans = []
    for name in (field.name for field in fields(found.default) if field.name in names):
        values = found.choices[name]
        place = values.index(getattr(found.default, name))
        plans += [replace(found.default, **{name: value}) for value in values[max(0, place - 1) : place + 2]]
    return plans


def distinct(found, plans) -> list:
    """The default, then those of the plans that the arch can run; of plans that make the same kernel the first one."""
    kept = {}
    for plan in [found.default, *plans]:
        if not found.valid(plan):
            kept.setdefault(found.kernel(plan).same, plan)
    return list(kept.values())


class Survey:
    """The traces of a GPU's surveyed plans."""

    def __init__(self, static: Static):
        self.static, self.arch = static, static.arch

    @functools.cache  # noqa: B019 (lives as long as the run)
    def traces(self, op: str, fmt: str, m: int) -> tuple[list, int]:
        """([(plan, launches)], k)."""
        workload = surveyed(op, fmt, m, self.arch)
        plans = candidates(space_of(workload, self.arch), self.arch, m)
        found = self.static.estimates([(workload, plan) for plan in plans])
        say(f"{self.arch.name} {op} {fmt} m{m}: {len(plans)} plans surveyed")
        return [
            (plan, one.launches) for plan, one in zip(plans, found, strict=True) if not isinstance(one, str)
        ], workload.args["k"]

    def ranked(self, workload: Operator, moved: float) -> list[tuple[float, object]]:
        """(seconds, plan) of the surveyed plans for another shape, the best first."""
        args, found = workload.args, space_of(workload, self.arch)
        fmt = args["gate"] if "gate" in args else args["segments"][0][0]
        traces, k = self.traces(workload.op, fmt, args["m"])
        best, scale = {}, args["k"] / k
        for surveyed_plan, launches in traces:
            (code, trace), *_ = launches
            busy = Counter({name: n * scale for name, n in trace.busy.items()})
            scaled = replace(trace, clocks=trace.clocks * scale, busy=busy)
            for plan in (
                [replace(surveyed_plan, waves=waves) for waves in (1, 2, 4, 8)]
                if found.plan_type is Plan
                else [surveyed_plan]
            ):
                if found.valid(plan):
                    continue
                kernel = found.kernel(plan)
                here = replace(code, grid=(kernel.workgroups, 1, 1), threads=kernel.threads)
                seconds = combine(
                    [(here, scaled)], moved, self.static.machine, run_of(workload, plan, self.arch)
                ).seconds
                best.setdefault(kernel.same, (seconds, plan))
        return sorted(best.values(), key=lambda pair: pair[0])


# ---- records


def space_of(workload: Operator, arch) -> Space:
    """The plans of a workload that has several."""
    if (found := space(workload, arch)) is None:
        raise ValueError(f"{workload.text}: there is one plan only")
    return found


def seconds_of(found: Measured) -> float:
    """Of a measurement that succeeded."""
    if found.seconds is None:
        raise ValueError(f"not measured: {found.error}")
    return found.seconds


@dataclass
class Choice:
    """What was found for a workload. best: (plan, prediction) of the best one besides the default; check: its
    verification, None where it does not clear the margin."""

    workload: Operator
    default: Measured
    best: tuple[Any, Measured] | None
    check: Checked | None = None

    @property
    def gain(self) -> float:
        """What the best other plan promises."""
        return seconds_of(self.default) / seconds_of(self.best[1]) - 1 if self.best else 0.0

    @property
    def clear(self) -> bool:
        return self.gain > margin(self.workload)

    @property
    def shipped(self) -> bool:
        """Whether it is not the default that is shipped."""
        return self.check is not None and self.check.passed


def neighbors(found) -> list:
    """The default and plans that differ from it in one number by one choice."""
    return distinct(found, steps(found, found.choices))


def plans_of(survey: Survey, workload: Operator) -> tuple[list, Choice | None]:
    """The plans of a workload that are built, the default first; where the survey answers alone, none, and its
    answer."""
    static, found = survey.static, space_of(workload, survey.arch)
    if workload.op == "embed" or (workload.op not in SURVEYED and 1 < workload.args.get("m", 1) < CHUNK):
        return [found.default], None  # a copy of rows; little work, for which what holds for CHUNK tokens will do
    if workload.op not in SURVEYED:
        return neighbors(found), None
    moved = work(workload, make(workload, None, static.kind, static.arch.name))["bytes"]
    untuned = found.kernel(found.default).same
    ranked = {found.kernel(plan).same: (seconds, plan) for seconds, plan in survey.ranked(workload, moved)}
    default, _ = ranked.pop(untuned, (None, None))
    enough = inf if default is None else default * (1 - margin(workload) / 2)
    if better := [plan for seconds, plan in ranked.values() if seconds < enough]:
        return [found.default, *better[: FINALISTS.get(workload.args["m"], 1)]], None
    if default is None:
        return [found.default], None
    measured = functools.partial(Measured, device=f"model of {static.arch.name}", runner=static.runner)
    best = next(((plan, measured(seconds)) for seconds, plan in ranked.values()), None)
    return [], Choice(workload, measured(default), best)


def choose(survey: Survey, workloads: dict[Operator, str]) -> list[Choice]:
    static = survey.static
    jobs, found = [], {}
    for workload in workloads:
        plans, found[workload] = plans_of(survey, workload)
        jobs += [(workload, plan) for plan in plans]
    say(f"{static.arch.name}: {len(workloads)} shapes, {len(jobs)} builds")
    measured = []
    for begin in range(0, len(jobs), BATCH):
        measured += static.measure(jobs[begin : begin + BATCH])
        say(f"{static.arch.name}: {len(measured)} built")
    for workload, group in itertools.groupby(zip(jobs, measured, strict=True), key=lambda pair: pair[0][0]):
        (_, untuned), *others = group
        if untuned.seconds is None:
            raise RuntimeError(f"{static.arch.name} {workload.text}: {untuned.error}")
        ran = [(plan, one) for (_, plan), one in others if one.seconds is not None]
        found[workload] = Choice(workload, untuned, min(ran, key=lambda pair: pair[1].seconds, default=None))
    choices = list(found.values())
    say(f"{static.arch.name}: {sum(one.clear for one in choices)} plans to check")
    return choices


def check(static: Static, choices: list[Choice], database: Database) -> None:
    """Verifies plans, with a model that has an emulator: once for kernels that differ in the number of rows, or GEMM's
    in that of columns."""
    emulate, known = static.emulate, {}
    assert emulate is not None
    for one in choices:
        if one.best is None or not one.clear:
            continue
        args, (plan, _) = one.workload.args, one.best
        formats = args["gate"] if "gate" in args else tuple(fmt for fmt, _ in args.get("segments", ()))
        shape = args.get("k", 0) if args.get("m") == 1 else args.get("d", 0)
        group = args["heads"] // args["kv_heads"] if "heads" in args else 0
        key = (one.workload.op, formats, shape, group, args.get("m", 1), plan)
        if key not in known:
            before = database.entry(one.workload).records.get(plan_text(asdict(plan)))
            started = time.monotonic()
            known[key] = emulate(one.workload, plan) if before is None or not before.passed else _check_of(before)
            say(f"{static.arch.name} {key}: {known[key]} ({time.monotonic() - started:.0f} s)")
        one.check = known[key]


def _check_of(record: Record) -> Checked:
    return Checked(record.checked, record.passed, record.deviation)


def keep(database: Database, arch, choices: list[Choice]) -> None:
    for one in choices:
        plans: list[tuple[Any, Measured, bool]] = [(space_of(one.workload, arch).default, one.default, True)]
        if one.check is not None and one.best is not None:
            plan, found = one.best
            plans.append((plan, found, False))
        for plan, found, is_default in plans:
            facts = {"device": found.device, "runner": found.runner, "at": time.time()}
            database.add(one.workload, Record(plan=asdict(plan), seconds=found.seconds, default=is_default, **facts))
        if one.check is not None and one.best is not None:
            database.check(one.workload, asdict(one.best[0]), one.check)


def export(database: Database, path: Path, source: str) -> int:
    """Writes the best plans, where they are not the default, as a file of shipped records (dist/README.md); returns how
    many. source: how they were found."""
    lines, empty = [], asdict(Record(plan={}, seconds=None))
    for entry in database.entries.values():
        if (winner := entry.winner) and not winner.default:
            facts = {name: value for name, value in asdict(winner).items() if value != empty[name]}
            if entry.untuned:
                facts["default_seconds"] = entry.untuned.seconds
            line = {"op": entry.workload.op, "args": entry.workload.args} | facts
            lines.append(json.dumps(line, separators=(",", ":")))
    arch = database.arch
    header = {"api": arch.api, "arch": arch.name, "tvm": tvm.__version__, "version": VERSION, "source": source}
    records = ",\n".join(sorted(lines))
    path.write_text(json.dumps(header)[:-1] + f', "records": [\n{records}\n]}}\n')
    return len(lines)


def table(arch, choices: list[Choice], names: dict[Operator, str], everything: bool) -> str:
    rows = []
    for one in choices:
        if not (everything or one.clear):
            continue
        plan, measured = one.best or (None, one.default)
        values = " ".join(f"{name}={value}" for name, value in asdict(plan).items()) if plan else "no other was built"
        state = "default: below the margin"
        if one.clear and one.check is not None:
            state = one.check.checked if one.check.passed else f"default: {one.check.error or 'wrong'}"
        times = f"{seconds_of(one.default) * 1e6:.1f}", f"{seconds_of(measured) * 1e6:.1f}", f"{one.gain:+.0%}"
        rows.append((names[one.workload], *times, values, state))
    head = ("kernel", "default us", "best other us", "gain", "its plan", "shipped")
    count = sum(one.shipped for one in choices)
    lines = [f"### {arch.name}: {len(choices)} kernels, {count} records", ""]
    lines += ["| " + " | ".join(head) + " |", "| --- " * len(head) + "|"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows]) + "\n"


def ship(name: str, cache: Path, out: Path, tables: Path | None) -> str:
    """Makes one arch's file. Returns the table of plans that clear the margin."""
    with (
        emulated.Emulator(ARCHS[name], name) as emulate,
        Static(ARCHS[name], name, emulate=emulate) as static,
        Database(static.arch, cache / file_name(name)) as database,
    ):
        names = tasks(MODELS, FORMATS, static.kind, name)
        choices = choose(Survey(static), names)
        check(static, choices, database)
        keep(database, static.arch, choices)
        say(f"{name}: {export(database, out / f'{file_name(name)}.json', SOURCE)} records")
        if tables:
            tables.mkdir(parents=True, exist_ok=True)
            (tables / f"{file_name(name)}.md").write_text(table(static.arch, choices, names, everything=True))
        return table(static.arch, choices, names, everything=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("archs", nargs="*", default=list(ARCHS))
    parser.add_argument(
        "--cache",
        type=Path,
        required=True,
        help="folder of databases, one for each arch; checks there are not repeated",
    )
    parser.add_argument("--out", type=Path, default=SHIPPED)
    parser.add_argument("--tables", type=Path, help="folder for a table of all records of each arch")
    options = parser.parse_args()
    if why := gfxemu.missing():
        parser.error(f"{why}: no plan is shipped that the emulator has not checked")
    for name in options.archs:
        print(ship(name, options.cache, options.out, options.tables), flush=True)


if __name__ == "__main__":
    main()
