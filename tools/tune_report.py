"""What tuning has found: tables of a model's tasks, and a plot of how it went.

In: what is tuned (tune.Subject) and the arch's database, which is only read. Out: text, or a picture.
"""

import importlib.util
from pathlib import Path
from typing import NamedTuple

from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.gpus import COOP_OPS, ROOFLINE_CLOCK, UNIT_OPS
from mlc_amd.schedules.tuning.database import LOG, Entry, Record, cache, entries_of, file_name, read_lines
from mlc_amd.schedules.tuning.spaces import space
from mlc_amd.tools import bandwidth, display

FORMATS = (".svg", ".png", ".pdf")
PLOTTED = 12  # tasks, those with the largest share of the time
MISSING = "the plot needs matplotlib; install it with: pip install 'mlc-amd[tune]'"
# Where neither a measurement nor a table tells: bytes and operations per second, so that shares of the time can be
# guessed.
GUESS = 50e9, 500e9, 0.0

# Operations per clock of a core, by what multiplies, and the clock: rough, from product pages. Rooflines only; GPUs'
# stand in runtime/gpus.py.
_CPU_OPS = {"Vnni512": 256, "Zen4": 128, "AvxVnni": 128, "Avx2": 64, "Portable": 16}
_CPU_FLOAT_OPS = {"Vnni512": 64, "Zen4": 32, "AvxVnni": 32, "Avx2": 32, "Portable": 8}  # attention's, float32
_CPU_CLOCK = 3e9


class TaskRow(NamedTuple):
    """A task and what is known of it; times in seconds of a call, None where nothing is.

    share     of the time of a turn, with the best plans known; where nothing was measured, as the roofline has it
    best      of the plans whose results are right
    roofline  what the machine allows; 0 where that is not known
    plans     how many there are, 1 for a task without choices; history: measurements in their order
    """

    task: object
    share: float
    default: float | None
    best: float | None
    roofline: float
    winner: Record | None
    measured: int
    failed: int
    plans: int
    history: list[Record]


def machine(subject) -> tuple[float, float, float]:
    """What `roofline` takes: bytes, operations and attention's operations per second that the arch can do at best; 0
    where that is not known. Of a CPU's memory, a measurement, where the code can run here."""
    arch = subject.arch
    if subject.kind == "cpu":
        from mlc_amd.runtime.host import cpu_flags

        here = cpu_flags().issuperset(arch.flags)
        isa, clocks = arch.isa.__name__, subject.threads * _CPU_CLOCK
        return (
            (bandwidth.measure(subject.threads) if here else 0.0),
            clocks * _CPU_OPS[isa],
            clocks * _CPU_FLOAT_OPS[isa],
        )
    if not arch.bandwidth:  # a profile that any GPU may be
        return 0.0, 0.0, 0.0
    ops = COOP_OPS.get(arch.family, 0) if arch.matrix == "coop" else UNIT_OPS[arch.matrix or arch.dot]
    return arch.bandwidth * 1e9, arch.units * ops * ROOFLINE_CLOCK[subject.kind], 0.0


def rooflines(subject) -> dict[str, float]:
    """What `rows` takes: measured, for a CPU that is here; else nothing. Takes about a second a kernel."""
    from mlc_amd.runtime.host import cpu_flags

    if subject.kind != "cpu" or not cpu_flags().issuperset(subject.arch.flags):
        return {}
    from mlc_amd.compiler.tuning import rooflines

    known = _entries(subject.arch)
    tasks = [task for task in subject.tasks if (task.workload.key, task.workload.hash) in known]
    with display.compile_progress("timing kernels beside what they cannot do without") as progress:
        return rooflines.measure(
            tasks, subject.arch, str(subject.threads), lambda done, total: progress("rooflines", done, total)
        )


def rows(subject, shares: dict[str, float] | None = None) -> list[TaskRow]:
    """The tasks, those with the largest share of the time first. shares: of the default kernels' times what rooflines
    take, by workload's key, where that was measured."""
    from mlc_amd.compiler.tuning.tasks import roofline

    rates = machine(subject)
    limit, guess = roofline(*rates), roofline(*(rate or other for rate, other in zip(rates, GUESS, strict=True)))
    known = _entries(subject.arch)
    found = []
    for task in subject.tasks:
        entry, choices = known.get((task.workload.key, task.workload.hash)), space(task.workload, subject.arch)
        winner, untuned = (entry.refresh(choices).winner, entry.untuned) if entry else (None, None)
        history = sorted(entry.records.values(), key=lambda record: record.at) if entry else []
        failed = sum(record.seconds is None or record.refuted for record in history)
        times = untuned.seconds if untuned else None, entry.seconds(winner) if winner else None
        weighed = task.weight * (times[1] or guess(task))
        counts = len(history), failed, len(choices.plans) if choices else 1
        measured = (shares or {}).get(task.workload.key)
        bound = measured * times[0] if measured and times[0] else limit(task)
        found.append(TaskRow(task, weighed, *times, bound, winner, *counts, history))
    total = sum(row.share for row in found) or 1.0
    return sorted((row._replace(share=row.share / total) for row in found), key=lambda row: -row.share)


def _entries(arch) -> dict[tuple[str, str], Entry]:
    lines, _ = read_lines(cache() / file_name(arch.name) / LOG)
    return {(entry.workload.key, entry.hash): entry for entry in entries_of(lines).values() if not entry.stale}


def gain(found: list[TaskRow], rooflines: bool = False) -> str:
    """What tuning has brought, in a line: the tasks' time in a turn, before and after. rooflines: and how near that is
    to theirs."""
    both = [row for row in found if row.default and row.best]
    if not both:
        return "nothing to compare with the default plans yet"
    before, after = (
        sum(row.task.weight * time for row, time in zip(both, times, strict=True)) for times in _times(both)
    )
    better = sum(row.best < row.default for row in both)
    text = (
        f"{better} of {len(both)} kernels faster, a turn's kernels {before * 1e3:.2f} -> {after * 1e3:.2f} ms "
        f"({before / after:.2f}x)"
    )
    if not rooflines or not all(row.roofline for row in both):
        return text
    least = sum(row.task.weight * row.roofline for row in both)
    return f"{text}; rooflines {least * 1e3:.2f} ms: {least / before:.0%} -> {least / after:.0%} of it"


def _times(found: list[TaskRow]) -> tuple[list[float], list[float]]:
    return [row.default for row in found], [row.best for row in found]


# ---- tables


def listing(subject, found: list[TaskRow]) -> str:
    """`tune --list`."""
    header = ("kernel", "per token", "per 512 tokens", "share", "default us", "best us", "plans", "measured")
    cells = []
    for row in found:
        token = row.task.calls.get("decode")
        chunk = {name: calls for name, calls in row.task.calls.items() if name != "decode"}
        per_chunk = " ".join(f"{calls:g} ({name.removeprefix('prefill_')})" for name, calls in chunk.items())
        calls = f"{token:g}" if token else "", per_chunk
        counts = row.plans if row.plans > 1 else "-", row.measured or ""
        cells.append((row.task.name, *calls, f"{row.share:.1%}", _us(row.default), _us(row.best), *counts))
    legend = (
        "per 512 tokens: calls (tokens of the function that makes them). share: of a prompt of 512 and an answer of "
        "128 tokens"
    )
    return f"{subject.shape}\n{display.table(header, cells, (1, 3, 4, 5, 6, 7))}{legend}"


def table(subject, found: list[TaskRow]) -> str:
    """`tune --report`."""
    header = (
        "kernel", "share", "default us", "best us", "gain", "roofline us", "GB/s", "TFLOP/s", "of roofline",
        "measured", "checked", "plan",
    )  # fmt: skip
    cells = []
    for row in found:
        if not row.history:
            continue
        gained = f"{row.default / row.best:.2f}x" if row.default and row.best else ""
        rates = (
            (f"{row.task.bytes / row.best / 1e9:.1f}", f"{row.task.flops / row.best / 1e12:.2f}")
            if row.best
            else ("", "")
        )
        of = f"{row.roofline / row.best:.0%}" if row.best and row.roofline else ""
        plan = (
            ""
            if row.winner is None
            else "default"
            if row.winner.default
            else " ".join(f"{k}={v}" for k, v in row.winner.plan.items())
        )
        checked = row.winner.checked if row.winner and not row.winner.default else ""
        times = _us(row.default), _us(row.best), gained, _us(row.roofline or None)
        cells.append(
            (row.task.name, f"{row.share:.1%}", *times, *rates, of, f"{row.measured}/{row.plans}", checked, plan)
        )
    if not cells:
        return f"{subject.shape}: nothing was measured yet"
    devices = sorted({record.device for row in found for record in row.history if record.device})
    runners = sorted({record.runner for row in found for record in row.history if record.runner})
    head = f"{subject.shape}; measured on {', '.join(devices) or 'no device'} ({', '.join(runners)})"
    return f"{head}\n{display.table(header, cells, range(1, 10))}{gain(found, rooflines=True)}"


def _us(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e6:.2f}"


# ---- plot


def check_output(path: Path) -> None:
    """UserError for a plot that cannot be made: before the work."""
    if path.suffix.lower() not in FORMATS:
        raise UserError(f"{path}: the plot's name must end with one of {', '.join(FORMATS)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError(MISSING)


def plot(subject, found: list[TaskRow], path: Path) -> None:
    """Draws, for the tasks with the largest share, the best time so far over the measurements, the default and the
    roofline. UserError without measurements, or without matplotlib."""
    check_output(path)
    shown = [row for row in found if any(record.seconds for record in row.history)][:PLOTTED]
    if not shown:
        raise UserError("nothing was measured yet: there is nothing to plot")
    from matplotlib.figure import Figure

    columns = min(3, len(shown))
    lines = -(-len(shown) // columns)
    figure = Figure(figsize=(5 * columns, 3 * lines), layout="constrained")
    for i, row in enumerate(shown):
        axes = figure.add_subplot(lines, columns, i + 1)
        numbers, times, bests = progress(row.history)
        axes.plot(numbers, times, ".", color="0.7", markersize=3, label="measured")
        axes.step(numbers, bests, where="post", color="tab:blue", label="best so far")
        if row.default:
            axes.axhline(row.default * 1e6, linestyle="--", color="tab:orange", label="default")
        if row.roofline:
            axes.axhline(row.roofline * 1e6, linestyle=":", color="tab:green", label="roofline")
        axes.set(yscale="log", xlabel="measurements", ylabel="us")
        axes.set_title(f"{row.task.name} ({row.share:.0%})", fontsize="small")
    figure.axes[0].legend(fontsize="x-small")
    figure.suptitle(f"{subject.shape}: {gain(found)}", fontsize="medium")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    display.message(f"plot: {path}")


def progress(history: list[Record]) -> tuple[list[int], list[float], list[float]]:
    """(numbers, us, best us so far) of the measurements that gave a time; wrong plans are no best ones."""
    numbers, times, bests = [], [], []
    for number, record in enumerate(history, 1):
        if record.seconds is None:
            continue
        numbers.append(number)
        times.append(record.seconds * 1e6)
        good = record.seconds * 1e6 if not record.refuted else float("inf")
        bests.append(min([good, *bests[-1:]]))
    return numbers, times, bests
