"""What people read: sizes, tables, progress on stderr, model text made safe for a terminal."""

import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

_STAGES = {"import": "import graph", "kernels": "compile kernels", "weights": "pack weights", "write": "write"}
# Everything below space but tab and newline, and DEL, and the C1 codes: a model must not steer the terminal.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def message(text: str) -> None:
    """A line for the user, on stderr: stdout is for results."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def size(count: float) -> str:
    """Bytes in the unit that reads well: "804.00 MiB"."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.2f} {unit}" if unit != "B" else f"{count:.0f} B"
        count /= 1024
    return f"{count:.2f} GiB"


def parameters(count: float) -> str:
    """A number of weights as llama-bench writes it: "1.50 B", "20.71 M"."""
    return f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.2f} M"


def table(header: Sequence[str], rows: Sequence[Sequence[object]], right: Sequence[int] = ()) -> str:
    """Lines of aligned columns; `right` lists the columns that align right."""
    cells = [list(header), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = []
    for row in cells:
        aligned = [cell.rjust(width) if i in right else cell.ljust(width) for i, (cell, width) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(aligned).rstrip())
    return "\n".join(lines) + "\n"


def printable(text: str) -> str:
    """Text of a model for stdout: unchanged into files and pipes, without control characters on a terminal."""
    return _CONTROL.sub("", text) if sys.stdout.isatty() else text


def stream(text: str) -> None:
    """Writes a piece of an answer to stdout at once."""
    sys.stdout.write(printable(text))
    sys.stdout.flush()


@contextmanager
def compile_progress(title: str) -> Iterator[Callable[[str, int, int], None]]:
    """A progress(stage, done, total) for the compiler: bars when stderr is a terminal, otherwise two lines, one before and one after."""
    start = time.perf_counter()
    if not sys.stderr.isatty():
        message(f"{title} ...")
        yield lambda stage, done, total: None
        message(f"{title}: done in {time.perf_counter() - start:.1f} s")
        return
    columns = (TextColumn("{task.description:16}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"), TimeElapsedColumn())
    message(title)
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        tasks = {}

        def progress(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(_STAGES.get(stage, stage), total=total)
            bars.update(tasks[stage], completed=done, total=total)

        yield progress


def speed(tokens: int, seconds: float) -> str:
    """Tokens per second: "41.2 tok/s"; "-" when nothing was measured."""
    return f"{tokens / seconds:.1f} tok/s" if tokens and seconds > 0 else "-"


def footer(stats, used: int, context: int) -> str:
    """One line about an answer: what was read anew, what the cache saved, how fast."""
    new = stats.prompt_tokens - stats.cached_tokens
    parts = [
        f"{new} new + {stats.cached_tokens} cached tokens in",
        f"first token {stats.ttft_s * 1000:.0f} ms",
        f"prefill {speed(new, stats.prefill_s)}",
        f"{stats.generated} tokens out, decode {speed(stats.generated - 1, stats.decode_s)}",
        f"context {used}/{context}",
    ]
    if stats.finish in ("length", "context", "interrupted"):
        parts.append({"length": "stopped at --max-tokens", "context": "the context is full", "interrupted": "interrupted"}[stats.finish])
    return " | ".join(parts)
