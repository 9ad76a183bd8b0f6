"""Output for people: sizes, tables, and progress on stderr."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich import progress as rich_progress
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn

from mlc_amd.runtime import leftovers
from mlc_amd.tools.terminal import terminal

if TYPE_CHECKING:
    from mlc_amd.runtime.engine.generation import Stats

_INTERVAL = 10.0  # least number of seconds between two lines of progress
_STAGES = {"import": "import graph", "kernels": "compile kernels", "weights": "pack weights", "write": "write"}


def message(text: str, dimmed: bool = False) -> None:
    """Writes a line for the user to stderr, as stdout is for results."""
    if dimmed:
        terminal.aside(text)
        text = ""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def _console() -> Console:
    """The console for progress bars. Their descriptions must be free of control characters."""
    return Console(file=terminal.unclean(sys.stderr))


def size(count: float) -> str:
    """Bytes with a suitable unit: "804.00 MiB"."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.2f} {unit}" if unit != "B" else f"{count:.0f} B"
        count /= 1024
    return f"{count:.2f} GiB"


def parameters(count: float) -> str:
    """A number of weights in llama-bench's notation: "1.50 B", "20.71 M"."""
    return f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.2f} M"


def table(header: Sequence[str], rows: Sequence[Sequence[object]], right: Sequence[int] = ()) -> str:
    """Lines of aligned columns. right: the columns that align right."""
    cells = [list(header), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = []
    for row in cells:
        placed = enumerate(zip(row, widths, strict=True))
        lines.append("  ".join(c.rjust(width) if i in right else c.ljust(width) for i, (c, width) in placed).rstrip())
    return "\n".join(lines) + "\n"


@contextmanager
def compile_progress(title: str) -> Iterator[Callable[[str, int, int], None]]:
    """A function progress(stage, done, total) for the compiler. If stderr is a terminal it shows bars; otherwise a line
    before the work, a line after it, and occasional lines in between."""
    start = time.perf_counter()
    with _stages(title, TextColumn("{task.percentage:>3.0f} %"), rich_progress.TimeElapsedColumn()) as progress:
        yield progress
    if not sys.stderr.isatty():
        message(f"{title}: done in {time.perf_counter() - start:.1f} s")


@contextmanager
def transfer_progress(title: str) -> Iterator[Callable[[str, int, int], None]]:
    """A function progress(stage, done, total) in bytes. If stderr is a terminal it shows a bar for each stage, with
    speed and remaining time; otherwise a line before the work, and occasional lines about its progress."""
    size, speed = rich_progress.DownloadColumn(binary_units=True), rich_progress.TransferSpeedColumn()
    with _stages(title, size, speed, rich_progress.TimeRemainingColumn()) as progress:
        yield progress


@contextmanager
def _stages(title: str, *columns: rich_progress.ProgressColumn) -> Iterator[Callable[[str, int, int], None]]:
    """A function progress(stage, done, total). If stderr is a terminal: bars with these columns, otherwise lines."""
    if not sys.stderr.isatty():
        message(f"{title} ...")
        say = _now_and_then(title)
        yield lambda stage, done, total: say(f"{_STAGES.get(stage, stage)} {100 * done // max(total, 1)} %")
        return
    message(title)
    named = TextColumn("{task.description:16}")
    with (
        terminal.silent_keyboard(),
        _shown(Progress(named, BarColumn(), *columns, console=_console(), transient=True)) as bars,
    ):
        tasks = {}

        def progress(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                name = escape(terminal.clean(_STAGES.get(stage, stage)))
                tasks[stage] = bars.add_task(name, total=total, completed=done)
            bars.update(tasks[stage], completed=done, total=total)

        yield progress


def _now_and_then(title: str) -> Callable[[str], None]:
    """A function that writes a line about the current work, unless it wrote one a few seconds ago."""
    last = time.monotonic()

    def say(what: str) -> None:
        nonlocal last
        if (now := time.monotonic()) - last >= _INTERVAL:
            last = now
            message(f"{title}: {what}")

    return say


@contextmanager
def _shown(bars: Progress) -> Iterator[Progress]:
    """Shows bars on the terminal. They are removed at the end, even if the process is ended."""
    gone = leftovers.note(bars.stop)
    try:
        with bars:
            yield bars
    finally:
        gone()


class _Clocked(Progress):
    """A bar that also advances with time."""

    def __init__(self, *columns, share: Callable[[], float]):
        super().__init__(*columns, console=_console(), transient=True)
        self._share = share

    def get_renderables(self):
        for task in self.task_ids:
            self.update(task, completed=self._share())
        return super().get_renderables()


@contextmanager
def budget_progress(title: str, seconds: float | None, count: int | None) -> Iterator[Callable[[int], None]]:
    """A function progress(done) for work that ends after `seconds`, or after `count` pieces (None: no such limit),
    whichever comes first. If stderr is a terminal it shows a bar with the remaining time, otherwise lines."""
    limits = [f"{count} measurements"] if count else []
    limits += [clock(seconds)] if seconds else []
    start, done = time.perf_counter(), 0
    title = f"{title}: {', at most '.join(limits)}"
    if not sys.stderr.isatty():
        message(f"{title} ...")
        say = _now_and_then(title)
        yield lambda measured: say(f"{measured} measured")
        return

    def share() -> float:
        spent = time.perf_counter() - start
        return min(1.0, max(spent / seconds if seconds else 0.0, done / count if count else 0.0))

    def left() -> str:
        """The remaining time; with only a count, estimated by the speed so far."""
        spent, part = time.perf_counter() - start, share()
        return f"{done} measured, {clock(spent / part - spent)} left" if part else "starting"

    def progress(measured: int) -> None:
        nonlocal done
        done = measured
        bars.update(task, left=left())

    texts = [TextColumn(text) for text in ("{task.description}", "{task.percentage:>3.0f} %", "{task.fields[left]}")]
    with terminal.silent_keyboard(), _shown(_Clocked(texts[0], BarColumn(), *texts[1:], share=share)) as bars:
        task = bars.add_task(escape(terminal.clean(title)), total=1.0, left=left())
        yield progress


def clock(seconds: float) -> str:
    """A duration: "42 s", "3.5 min"."""
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.1f} min"


def speed(tokens: int, seconds: float) -> str:
    """Tokens per second: "41.2 tok/s", "2654 tok/s"; "-" if nothing was measured."""
    if tokens <= 0 or seconds <= 0:
        return "-"
    rate = tokens / seconds
    return f"{rate:.{0 if rate >= 100 else 1}f} tok/s"


_FINISH = {"length": "max_tokens reached", "context": "the context is full", "interrupted": "interrupted"}


def statistics(stats: "Stats", context: int) -> list[str]:
    """The statistics of an answer as texts, the most important first."""
    new = stats.prompt_tokens - stats.cached_tokens
    return [
        *([_FINISH[stats.finish]] if stats.finish in _FINISH else []),
        f"{stats.generated} out, {speed(stats.generated - 1, stats.decode_s)}",
        *([f"{stats.accepted} of {stats.guessed} guesses right"] if stats.guessed else []),
        f"{new} new + {stats.cached_tokens} cached in, {speed(new, stats.prefill_s)}",
        f"context {min(stats.tokens, context)}/{context}",
        f"first token {stats.ttft_s * 1000:.0f} ms",
    ]


def footer(parts: Sequence[str], width: int) -> str:
    """The first of `parts`, and those of the others that fit a line of this width."""
    line, *others = parts
    for part in others:
        longer = f"{line} | {part}"
        line = longer if len(longer) <= width else line
    return line
