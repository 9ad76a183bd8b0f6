"""Makes dist/tuned/<arch>.json, the tuning records that the project ships for GPUs that nobody has measured:

    python tests/ship_tuned.py --cache DIR [ARCH ...]

For the linear layers of the models below, decoding (one token) and prefill (512), plans are ranked by the static model
(compiler/tuning/static.py). A record is shipped where the model says that a plan is faster than the default by MARGINS, and its kernel
passes the gate in the ISA emulator (TINYGRAD_SRC; see gfxemu.py). Prints a table of what it predicts.

Building every plan of every shape would take days, so there are two steps: a survey of plans at one shape, whose waves' traces stand for
other shapes, and then the default and the most promising plans of each shape, built as they are.
"""

import argparse
import functools
import itertools
import os
import sys
import time
from collections import Counter
from dataclasses import fields, replace
from math import inf
from pathlib import Path

from mlc_amd.compiler.gguf.synthetic import PRESETS
from mlc_amd.compiler.tuning import gate
from mlc_amd.compiler.tuning.build import make, work
from mlc_amd.compiler.tuning.static import Static, combine, run_of
from mlc_amd.schedules.gpu.gemv import Plan
from mlc_amd.schedules.tuning.database import SHIPPED, Checked, Database, Measured, Record, file_name
from mlc_amd.schedules.tuning.spaces import as_dict, space
from mlc_amd.schedules.tuning.workload import Workload

ARCHS = {"gfx1100": "rocm", "gfx1201": "rocm", "gfx942": "rocm", "gfx1030": "rocm", "vangogh": "vulkan", "gfx1151": "rocm"}
MODELS = ("llama3-8b", "llama3-1b", "qwen3-8b", "qwen3-0.6b", "llama2-7b")
FORMATS = ("q4_0", "q4_k", "q6_k", "q8_0")
CHUNK = 512
# How much faster than the default a plan must be predicted to be: more than the model ever promised wrongly where it could be compared
# (tests/static_correlation.py on an H200: 21 % for a GEMV, 39 % for a GEMM, both slower in truth).
MARGINS = {1: 0.25, CHUNK: 0.4}
FINALISTS = 2  # plans of a shape that are built after the survey
SOURCE = "static model of the GPU (compiler/tuning/static.py); nothing was measured on it"
SURVEYED = {"linear": {"n": 4096, "k": 4096}, "gate_up_swiglu": {"n": 14336, "k": 4096}}


def say(text: str) -> None:
    print(f"# {text}", file=sys.stderr, flush=True)


def linear(fmt: str, rows, k: int, m: int, act: str, residual: bool) -> Workload:
    segments = [[fmt, n] for n in rows]
    args = {"segments": segments, "k": k, "m": m, "act": act, "biases": [False] * len(rows), "residual": residual}
    return Workload("linear", args)


def gate_up(fmt: str, n: int, k: int, m: int, act: str) -> Workload:
    return Workload("gate_up_swiglu", {"gate": fmt, "up": fmt, "n": n, "k": k, "m": m, "act_in": act, "act_out": act})


def act_of(arch, m: int) -> str:
    """The layout of activations, as targets choose it for int8 formats."""
    return {"rocm": "half", "vulkan": "pairs"}[arch.api] if m > 1 and arch.matrix else "rows"


def tasks(preset: str, fmt: str, arch) -> dict[str, Workload]:
    """A model's linear layers by name."""
    shape = PRESETS[preset]
    hidden, ffn, d = shape["hidden"], shape["ffn"], shape["head_dim"]
    q, kv = shape["heads"] * d, shape["kv_heads"] * d
    found = {"head m1": linear(fmt, [shape["vocab"]], hidden, 1, act_of(arch, 1), False)}
    for m in (1, CHUNK):
        act = act_of(arch, m)
        found |= {
            f"qkv m{m}": linear(fmt, [q, kv, kv], hidden, m, act, False),
            f"o m{m}": linear(fmt, [hidden], q, m, act, True),
            f"gate_up m{m}": gate_up(fmt, ffn, hidden, m, act),
            f"down m{m}": linear(fmt, [hidden], ffn, m, act, True),
        }
    return found


# ---- survey


def surveyed(op: str, fmt: str, m: int, arch) -> Workload:
    """The shape whose traces stand for others."""
    sizes, act = SURVEYED[op], act_of(arch, m)
    return linear(fmt, [sizes["n"]], sizes["k"], m, act, True) if op == "linear" else gate_up(fmt, sizes["n"], sizes["k"], m, act)


def candidates(found, arch) -> list:
    """The plans of a space that are surveyed. GEMV: a workgroup's waves change nothing but the grid. GEMM: neighbors of the default."""
    if found.plan_type is Plan:
        wide = itertools.product((1, 2, 4), (4,), (arch.wave,), (1, 2, 4))
        plans = [Plan(*values) for values in (*wide, *itertools.product((2, 4), (4,), (16,), (1, 2)))]
    else:
        tile, plans = found.default, []
        for field in fields(tile):
            values = found.choices[field.name]
            place = values.index(getattr(tile, field.name))
            plans += [replace(tile, **{field.name: value}) for value in values[max(0, place - 1) : place + 2]]
        if hasattr(tile, "waves_m"):  # the same tile cut otherwise, larger ones
            m, n = tile.waves_m, tile.waves_n
            changes = [{"waves_m": m * 2, "waves_n": max(1, n // 2)}, {"waves_m": max(1, m // 2), "waves_n": n * 2}]
            changes += [{"tokens": tile.tokens * 2, "waves_m": m * 2}, {"rows": tile.rows * 2, "waves_n": n * 2}]
            plans += [replace(tile, **change) for change in changes]
        plans = [plan for plan in plans if plan.tokens <= gate.TOKENS[0]]  # those that are soon checked
    distinct = {}
    for plan in [found.default, *plans]:
        if not found.valid(plan):
            distinct.setdefault(found.kernel(plan).same, plan)
    return list(distinct.values())


class Survey:
    """The traces of a GPU's surveyed plans."""

    def __init__(self, static: Static):
        self.static, self.arch = static, static.arch

    @functools.cache  # noqa: B019 (lives as long as the run)
    def traces(self, op: str, fmt: str, m: int) -> tuple[list, int]:
        """([(plan, launches)], k)."""
        workload = surveyed(op, fmt, m, self.arch)
        plans = candidates(space(workload, self.arch), self.arch)
        found = self.static.estimates([(workload, plan) for plan in plans])
        say(f"{self.arch.name} {op} {fmt} m{m}: {len(plans)} plans surveyed")
        return [(plan, one.launches) for plan, one in zip(plans, found, strict=True) if not isinstance(one, str)], workload.args["k"]

    def ranked(self, workload: Workload, moved: float) -> list[tuple[float, object]]:
        """(seconds, plan) of the surveyed plans for another shape, the best first."""
        args, found = workload.args, space(workload, self.arch)
        fmt = args["gate"] if "gate" in args else args["segments"][0][0]
        traces, k = self.traces(workload.op, fmt, args["m"])
        best, scale = {}, args["k"] / k
        for surveyed_plan, launches in traces:
            (code, trace), *_ = launches
            scaled = replace(trace, clocks=trace.clocks * scale, busy=Counter({name: n * scale for name, n in trace.busy.items()}))
            for plan in [replace(surveyed_plan, waves=waves) for waves in (1, 2, 4, 8)] if found.plan_type is Plan else [surveyed_plan]:
                if found.valid(plan):
                    continue
                kernel = found.kernel(plan)
                here = replace(code, grid=(kernel.workgroups, 1, 1), threads=kernel.threads)
                seconds = combine([(here, scaled)], moved, self.static.machine, run_of(workload, plan, self.arch)).seconds
                best.setdefault(kernel.same, (seconds, plan))
        return sorted(best.values(), key=lambda pair: pair[0])


# ---- records


def choose(survey: Survey, workloads: dict[Workload, str]) -> list[tuple[Workload, object, Measured, Measured]]:
    """(workload, plan, its prediction, the default's) where a plan is clearly better."""
    static, chosen = survey.static, []
    jobs, firsts = [], {}
    for workload in workloads:
        moved, _ = work(workload, make(workload, None, static.kind, static.arch.name), static.kind)
        found = space(workload, static.arch)
        if found is None:
            continue
        ranked = survey.ranked(workload, moved)
        untuned = found.kernel(found.default).same
        default = next((seconds for seconds, plan in ranked if found.kernel(plan).same == untuned), inf)
        enough = default * (1 - MARGINS[workload.args["m"]] / 2)
        better = [plan for seconds, plan in ranked if seconds < enough][:FINALISTS]
        if better:
            firsts[workload] = len(jobs)
            jobs += [(workload, plan) for plan in (found.default, *better)]
    say(f"{static.arch.name}: {len(firsts)} of {len(workloads)} shapes look improvable, {len(jobs)} builds")
    for begin in range(0, len(jobs), 30):
        part = jobs[begin : begin + 30]
        jobs[begin : begin + 30] = zip(part, static.measure(part), strict=True)
    say(f"{static.arch.name}: built")
    groups = itertools.groupby(jobs, key=lambda job: job[0][0].text)
    for _, group in groups:
        ((workload, _), untuned), *others = group
        ran = [(plan, measured) for (_, plan), measured in others if measured.seconds is not None]
        if untuned.seconds is None or not ran:
            continue
        plan, measured = min(ran, key=lambda pair: pair[1].seconds)
        if measured.seconds * (1 + MARGINS[workload.args["m"]]) < untuned.seconds:
            chosen.append((workload, plan, measured, untuned))
    say(f"{static.arch.name}: {len(chosen)} plans to check")
    return chosen


def checked(static: Static, chosen, known: dict) -> list[Checked]:
    """The gate's finding for each. Kernels that differ in the number of rows, or GEMM's in that of columns, are checked once."""
    found = []
    for workload, plan, *_ in chosen:
        args = workload.args
        formats = args["gate"] if "gate" in args else tuple(fmt for fmt, _ in args["segments"])
        key = (static.arch.name, workload.op, formats, args["k"] if args["m"] == 1 else 0, args["m"], plan)
        if key not in known:
            started = time.monotonic()
            known[key] = static.gate(workload, plan)
            say(f"{static.arch.name} {key[1:]}: {known[key]} ({time.monotonic() - started:.0f} s)")
        found.append(known[key])
    return found


def table(arch, chosen, names: dict[Workload, str], checks: list[Checked]) -> str:
    rows = []
    for (workload, plan, measured, untuned), check in zip(chosen, checks, strict=True):
        gain = untuned.seconds / measured.seconds - 1
        values = " ".join(f"{name}={value}" for name, value in as_dict(plan).items())
        state = check.checked if check.passed else f"not shipped: {check.error or 'wrong'}"
        rows.append((names[workload], f"{untuned.seconds * 1e6:.1f}", f"{measured.seconds * 1e6:.1f}", f"{gain:+.0%}", values, state))
    head = ("kernel", "default us", "plan us", "gain", "plan", "checked")
    lines = [f"### {arch.name}: {len(rows)} records of {len(names)} shapes", "", "| " + " | ".join(head) + " |", "| --- " * len(head) + "|"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows]) + "\n"


def ship(name: str, cache: Path, out: Path, tokens: tuple[int, ...]) -> str:
    """Makes one arch's file. Returns the table."""
    with Static(ARCHS[name], name) as static:
        names: dict[Workload, str] = {}
        for preset, fmt in itertools.product(MODELS, FORMATS):
            for label, workload in tasks(preset, fmt, static.arch).items():
                if workload.args["m"] in tokens:
                    names.setdefault(workload, f"{preset} {fmt} {label}")
        chosen = choose(Survey(static), names)
        checks = checked(static, chosen, {})
        with Database(static.arch, cache / file_name(name)) as database:
            for (workload, plan, measured, untuned), check in zip(chosen, checks, strict=True):
                default = space(workload, static.arch).default
                for used, found, is_default in ((default, untuned, True), (plan, measured, False)):
                    facts = {"device": found.device, "runner": found.runner, "at": time.time()}
                    database.add(workload, Record(as_dict(used), found.seconds, is_default, **facts))
                database.check(workload, as_dict(plan), check)
            say(f"{name}: {database.export(out / f'{file_name(name)}.json', SOURCE)} records")
        return table(static.arch, chosen, names, checks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("archs", nargs="*", default=list(ARCHS))
    parser.add_argument("--cache", type=Path, required=True, help="folder of databases, one for each arch; what is there is kept")
    parser.add_argument("--out", type=Path, default=SHIPPED)
    parser.add_argument("--tokens", type=int, nargs="*", default=[1, CHUNK])
    options = parser.parse_args()
    if "TINYGRAD_SRC" not in os.environ:
        parser.error("set TINYGRAD_SRC: no record is shipped that the emulator has not checked")
    for name in options.archs:
        print(ship(name, options.cache, options.out, tuple(options.tokens)), flush=True)


if __name__ == "__main__":
    main()
