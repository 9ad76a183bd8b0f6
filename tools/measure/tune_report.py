"""Tables of a model's tuning tasks, and a plot of the progress of tuning."""

from pathlib import Path

from mlc_amd.compiler.tuning.summary import TaskRow, gain, progress
from mlc_amd.runtime import extras
from mlc_amd.runtime.artifact.manifest import IMAGE
from mlc_amd.runtime.errors import UserError
from mlc_amd.tools.terminal import display

FORMATS = (".svg", ".png", ".pdf")
PLOTTED = 12  # limit of plotted tasks: those with the largest share of the time


def listing(shape: str, found: list[TaskRow]) -> str:
    """The text of `tune --list`."""
    header = ("kernel", "per step", "per 512 tokens", "share", "default us", "best us", "plans", "measured")
    cells = []
    for row in found:
        calls = (_calls(row, "decode", "step_", IMAGE), _calls(row, "prefill_"))
        counts = row.plans if row.plans > 1 else "-", len(row.history) or ""
        cells.append((row.task.name, *calls, f"{row.share:.1%}", _us(row.default), _us(row.best), *counts))
    legend = (
        "per step: calls (sequences of the step, if several, or patches of images); per 512 tokens: calls (tokens of "
        "the function that makes them). share: of a prompt of 512 tokens, and 128 tokens of answers of one and of "
        "several sequences"
    )
    return f"{shape}\n{display.table(header, cells, (1, 3, 4, 5, 6, 7))}{legend}"


def _calls(row: TaskRow, *kinds: str) -> str:
    """The calls in functions whose names begin with one of `kinds`: "32 32 (8)"."""
    counts = {name: count for name, count in row.task.calls.items() if name.startswith(kinds)}
    return " ".join(f"{count:g}{''.join(f' ({m})' for m in name.split('_')[1:])}" for name, count in counts.items())


def table(shape: str, found: list[TaskRow]) -> str:
    """The text of `tune --report`."""
    header = (
        "kernel", "share", "default us", "best us", "gain", "roofline us", "GB/s", "TFLOP/s", "of roofline",
        "measured", "checked", "plan",
    )  # fmt: skip
    cells = []
    for row in found:
        if not row.history:
            continue
        gained, rates, of, checked, plan = "", ("", ""), "", "", ""
        if row.best and row.winner:
            gained = f"{row.default / row.best:.2f}x" if row.default else ""
            rates = f"{row.task.bytes / row.best / 1e9:.1f}", f"{row.task.flops / row.best / 1e12:.2f}"
            of = f"{row.roofline / row.best:.0%}" if row.roofline else ""
            values = " ".join(f"{name}={value}" for name, value in row.winner.plan.items())
            checked, plan = ("", "default") if row.winner.default else (row.winner.checked, values)
        times = _us(row.default), _us(row.best), gained, _us(row.roofline or None)
        counts = f"{len(row.history)}/{row.plans}"
        cells.append((row.task.name, f"{row.share:.1%}", *times, *rates, of, counts, checked, plan))
    if not cells:
        return f"{shape}: nothing was measured yet"
    devices = sorted({record.device for row in found for record in row.history if record.device})
    runners = sorted({record.runner for row in found for record in row.history if record.runner})
    head = f"{shape}; measured on {', '.join(devices) or 'no device'} ({', '.join(runners)})"
    return f"{head}\n{display.table(header, cells, range(1, 10))}{gain(found, rooflines=True)}"


def _us(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e6:.2f}"


# ---- plot


def check_output(path: Path) -> None:
    """Raises UserError for a plot that cannot be made, before the work for it."""
    if path.suffix.lower() not in FORMATS:
        raise UserError(f"{path}: the plot's name must end with one of {', '.join(FORMATS)}")
    extras.require("matplotlib")


def plot(shape: str, found: list[TaskRow], path: Path) -> None:
    """Plots, for the tasks with the largest share of the time, the best time so far against the number of measurements,
    the default and the roofline. Raises UserError without measurements, or without matplotlib."""
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
    figure.suptitle(f"{shape}: {gain(found)}", fontsize="medium")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    display.message(f"plot: {path}")
