"""What people look for first in a model, which `mlc-amd inspect` begins with: its name, size, quantization, memory.

In: facts of a GGUF file or an artifact. Out: entries of the report (`entries`), and its first lines (`lines`).
"""

from collections.abc import Mapping
from typing import Any

from mlc_amd.tools.inspection import inspect_memory
from mlc_amd.tools.terminal import display

KEYS = ("name", "size", "parameters", "quantization", "context", "memory")  # of the report
WIDTH = 14  # of labels
_GUESSED = 1024  # a bit of general.file_type: whoever wrote the file was not sure


def entries(
    name: object, size: int, count: int, totals: Mapping[str, int], file_type: object = None
) -> dict[str, object]:
    """The first of KEYS. size: bytes on disk; count: weights; totals: bytes by tensor type; file_type: of the
    metadata."""
    return {"name": name, "size": size, "parameters": count, "quantization": quantization(file_type, totals)}


def quantization(file_type: object, totals: Mapping[str, int]) -> str:
    """As files of that kind are called, such as Q4_K_M; where the file does not say, by what most of its bytes are."""
    from gguf import LlamaFileType

    if isinstance(file_type, int) and not isinstance(file_type, bool) and file_type & ~_GUESSED in set(LlamaFileType):
        return LlamaFileType(file_type & ~_GUESSED).name.removeprefix("MOSTLY_").removeprefix("ALL_")
    return f"mostly {max(totals, key=lambda name: totals[name]).upper()}" if totals else "none"


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
