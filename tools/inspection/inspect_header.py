"""What `mlc-amd inspect` shows of a GGUF file whose architecture is not supported: the content of its header.

In: the file. Out: a report of sections, as for other files, and functions that show them. The model is not interpreted.
"""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlc_amd.runtime.errors import UserError, shorten
from mlc_amd.tools.inspection import inspect_summary
from mlc_amd.tools.inspection.inspect_summary import WIDTH
from mlc_amd.tools.terminal import display

if TYPE_CHECKING:
    from mlc_amd.compiler.gguf.header import TensorEntry

_LISTED = 16  # limit of the shown values of a list; for longer lists the length is shown


def report(path: Path, refusal: UserError) -> dict[str, Any]:
    """The report of a file that was rejected. Raises `refusal` if its reason is not the architecture."""
    from mlc_amd.compiler.gguf.reader import quantization, read_header
    from mlc_amd.compiler.models.registry import architectures

    metadata, entries, on_disk = read_header(path)
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture in architectures():
        raise refusal
    listing = []
    for entry in entries:
        dtype, size = _stored(entry)
        listing.append({"name": entry.name, "dtype": dtype, "shape": list(entry.shape), "bytes": size})
    types: dict[str, dict[str, int]] = {}
    for tensor in listing:
        total = types.setdefault(tensor["dtype"], {"tensors": 0, "weights": 0, "bytes": 0})
        total["tensors"] += 1
        total["weights"] += math.prod(tensor["shape"])
        total["bytes"] += tensor["bytes"] or 0
    name, count = metadata.get("general.name", ""), sum(entry["weights"] for entry in types.values())
    return {
        **inspect_summary.entries(name, on_disk, count, quantization(metadata, types)),
        "file": str(path),
        "refusal": str(refusal).removeprefix(f"{path}: "),
        "metadata": {key: _brief(value) for key, value in metadata.items() if not key.startswith("tokenizer.")},
        "tokenizer": _tokenizer(metadata),
        "types": types,
        "tensors": listing,
    }


def _tokenizer(metadata: dict[str, Any]) -> dict[str, object]:
    """The tokenizer's keys, with the texts of the tokens to which its ids refer."""
    tokens, found = metadata.get("tokenizer.ggml.tokens"), {}
    tokens = tokens if isinstance(tokens, list) else []
    for key, value in metadata.items():
        if key.startswith("tokenizer."):
            named = key.endswith("_token_id") and isinstance(value, int) and 0 <= value < len(tokens)
            shown = f"{value} {tokens[value]!r}" if named else _brief(value)
            found[key.removeprefix("tokenizer.").removeprefix("ggml.")] = shown
    return found


def _brief(value: object) -> object:
    if isinstance(value, list) and len(value) > _LISTED:
        return f"{len(value)} values"
    if isinstance(value, str) and (len(value) > len(shorten(value)) or not value.isprintable()):
        return shorten(value)
    return value


def _stored(entry: "TensorEntry") -> tuple[str, int | None]:
    """(name of a tensor's type, its bytes). For a type that gguf-py does not know: (its number, None)."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        kind = GGMLQuantizationType(entry.gguf_type)
    except ValueError:
        return f"number {entry.gguf_type}", None
    block, size = GGML_QUANT_SIZES[kind]
    return kind.name.lower(), math.prod(entry.shape) // block * size


def _pairs(title: str):
    def show(pairs: dict[str, object]) -> str:
        width = max(map(len, pairs), default=0) + 2
        return f"{title}\n" + "".join(f"  {key.ljust(width)}{value}\n" for key, value in pairs.items())

    return show


def _types(types: dict[str, dict[str, int]]) -> str:
    largest_first = sorted(types.items(), key=lambda item: -item[1]["bytes"])
    rows = [(n, e["tensors"], display.parameters(e["weights"]), display.size(e["bytes"])) for n, e in largest_first]
    return display.table(("type", "tensors", "weights", "size"), rows, right=(1, 2, 3))


# section -> function that shows it
SECTIONS = {
    "refusal": lambda reason: f"{'compile':{WIDTH}}not possible: {reason}",
    "metadata": _pairs("metadata"),
    "tokenizer": _pairs("tokenizer"),
    "types": _types,
}
