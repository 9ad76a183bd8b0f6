"""The first lines of `mlc-amd inspect`: a model's name, size, quantization and memory, which people look for first.

In: facts of a GGUF file or an artifact. Out: entries of the report (`entries`), and its first lines (`lines`).
"""

from collections.abc import Mapping
from typing import Any

from mlc_amd.tools.inspection import inspect_memory
from mlc_amd.tools.terminal import display

KEYS = ("name", "size", "parameters", "quantization", "context", "memory")  # keys of the report
WIDTH = 14  # width of labels


def entries(name: object, size: int, count: int, quantization: str) -> dict[str, object]:
    """The report's values for the first of KEYS. size: bytes on disk. count: number of weights."""
    return {"name": name, "size": size, "parameters": count, "quantization": quantization}


def lines(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(label, text) for each of KEYS that the report has."""
    shown = {
        "name": lambda name: name or "none",
        "size": lambda size: f"{display.size(size)} on disk",
        "parameters": display.parameters,
        "quantization": str,
    }
    found = [(key, show(report[key])) for key, show in shown.items() if key in report]
    if "memory" in report:
        longest, memory = report["model"]["context"], report["memory"]
        more = f"; the model was made for up to {longest} (--ctx)" if longest > memory["context"] else ""
        found += [("context", f"{memory['context']} tokens{more}"), *inspect_memory.lines(memory)]
    return found
