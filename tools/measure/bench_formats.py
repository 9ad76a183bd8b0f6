"""The output formats of `mlc-amd bench`: Markdown with llama-bench's columns, JSON, JSON lines and CSV.

In: the result of one test, a dict with `bench`'s fields. Out: text. `writer` makes the writer of a format.
"""

import csv
import io
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import chain, repeat
from json import dumps

from mlc_amd.tools.terminal import display

# Columns only for models that generate tokens, and columns only for other models.
OF_TOKENS = ("n_cpu_moe", "GB/s", "of measured", "of table", "host us", "W", "J/token")
OF_OTHERS = ("texts/s", "images/s")

# (text before the results, function from a result to text, text after them)
Writer = tuple[str, Callable[[dict], str], str]

# (title, width, whether it aligns right, function from a result to its value)
_COLUMNS: tuple[tuple[str, int, bool, Callable[[dict], object]], ...] = (
    ("model", 30, False, lambda r: r["model_type"]),
    ("size", 10, True, lambda r: display.size(r["model_size"])),
    ("params", 10, True, lambda r: display.parameters(r["model_n_params"])),
    ("backend", 10, False, lambda r: r["backends"]),
    ("threads", 7, True, lambda r: r["n_threads"]),
    ("n_cpu_moe", 9, True, lambda r: r["n_cpu_moe"]),
    ("test", 15, True, lambda r: r["test"]),
    ("t/s", 20, True, lambda r: f"{r['avg_ts']:.2f} ± {r['stddev_ts']:.2f}"),
    ("texts/s", 10, True, lambda r: f"{r['texts_per_s']:.2f}"),
    ("images/s", 10, True, lambda r: f"{r['images_per_s']:.2f}"),
    ("GB/s", 8, True, lambda r: f"{r['read_gbps']:.2f}" if r["n_gen"] else ""),
    ("of measured", 21, True, lambda r: _share(r, "read_share", f"{r['machine_gbps'] or 0:.1f} ({r['machine_how']})")),
    ("of table", 21, True, lambda r: _share(r, "peak_share", f"{r['peak_gbps'] or 0} ({r['peak_product']})")),
    ("host us", 8, True, lambda r: f"{r['host_us']:.1f}" if r["n_gen"] else ""),
    ("W", 8, True, lambda r: "" if r["power_w"] is None else f"{r['power_w']:.1f}"),
    ("J/token", 9, True, lambda r: "" if r["joules_per_token"] is None else f"{r['joules_per_token']:.4g}"),
)  # fmt: skip


def writer(name: str, hidden: Collection[str] = ()) -> Writer:
    """The writer of format `name`. hidden: titles of columns that Markdown leaves out."""
    if name == "jsonl":
        return "", lambda result: dumps(result) + "\n", ""
    return {"md": partial(_markdown, hidden), "json": _json, "csv": _csv}[name]()


def _share(result: dict, share: str, of: str) -> str:
    return f"{result[share]:.0%} of {of}" if result[share] else ""


def _markdown(hidden: Collection[str]) -> Writer:
    columns = [column for column in _COLUMNS if column[0] not in hidden]

    def line(cells: Sequence[object]) -> str:
        placed = zip(cells, columns, strict=True)
        aligned = (f"{cell!s:>{width}}" if right else f"{cell!s:<{width}}" for cell, (_, width, right, _) in placed)
        return "| " + " | ".join(aligned) + " |\n"

    def write(result: dict) -> str:
        return line([shown(result) for *_, shown in columns])

    rule = "| " + " | ".join("-" * (width - 1) + (":" if right else "-") for _, width, right, _ in columns) + " |\n"
    return line([title for title, *_ in columns]) + rule, write, ""


def _json() -> Writer:
    between = chain([""], repeat(",\n"))
    return "[\n", lambda result: next(between) + dumps(result, indent=1), "\n]\n"


def _csv() -> Writer:
    titles = chain([True], repeat(False))

    def write(result: dict) -> str:
        flat = {name: value for name, value in result.items() if not isinstance(value, list | dict)}
        text = io.StringIO()
        writer = csv.writer(text, quoting=csv.QUOTE_ALL, lineterminator="\n")
        if next(titles):
            writer.writerow(flat)
        writer.writerow("" if value is None else value for value in flat.values())
        return text.getvalue()

    return "", write, ""
