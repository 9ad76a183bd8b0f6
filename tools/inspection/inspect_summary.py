"""What people look for first in a model, which `mlc-amd inspect` begins with: its name, size, quantization, memory.

In: facts of a GGUF file or an artifact. Out: entries of the report (`entries`), and its first lines (`lines`).
"""

from collections.abc import Mapping
from typing import Any

from mlc_amd.tools.inspection import inspect_memory
from mlc_amd.tools.terminal import display

KEYS = ("name", "size", "parameters", "quantization", "context", "memory")  # of the report
WIDTH = 14  # of labels


def entries(name: object, size: int, count: int, quantization: str) -> dict[str, object]:
    """The first of KEYS. size: bytes on disk; count: weights."""
    return {"name": name, "size": size, "parameters": count, "quantization": quantization}


def lines(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(label, text) of those of KEYS that the report has."""
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
