"""Finds the image encoder (mmproj file) for a GGUF file.

In: the model's file and the caller's options. Out: the encoder's file, or None. An encoder in the model's folder is
used if it fits the model and can be compiled. Otherwise a message says why the model has none.
"""

import os
import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from mlc_amd.runtime.errors import UsageError, UserError
from mlc_amd.runtime.options import CompileOptions
from mlc_amd.tools.terminal import display

WORD = "mmproj"  # part of the file's name that converters write
SNAPSHOTS = "snapshots"  # folder of the hub's cache, with a folder for each commit of a repository
_TYPES = ("f16", "bf16", "q8_0", "f32")  # of several files, the one with the first of these types is used
_TYPE = re.compile(rf"(?<![a-z0-9])({'|'.join(_TYPES)})\.gguf$")


def preferred(names: Iterable[str]) -> list[str]:
    """The encoders among these file names, the preferred one first."""

    def order(name: str) -> tuple[int, str]:
        found = _TYPE.search(name.lower())
        return _TYPES.index(found[1]) if found else len(_TYPES), name

    return sorted(
        (name for name in names if name.endswith(".gguf") and WORD in PurePosixPath(name).name.lower()), key=order
    )


def choose(model: Path | None, options: CompileOptions) -> str | None:
    """The path of the encoder for a GGUF file, or for a synthetic model (model is None). Raises UserError if the caller
    names a file that does not exist."""
    if options.no_mmproj:
        if options.mmproj is not None:
            raise UsageError("give --mmproj FILE or --no-mmproj, not both")
        return None
    if options.mmproj is not None:
        path = Path(os.path.expanduser(options.mmproj))
        if not path.is_file():
            raise UserError(f"{path}: there is no such file; give the mmproj file of the model's image encoder")
        return str(path)
    return _beside(model) if model else None


def _beside(model: Path) -> str | None:
    """The encoder in the model's folder that belongs to the model: one for models whose names begin like this model's,
    else one whose name refers to no model. None if there is none, or if it cannot be compiled."""
    folder = model.parent
    if folder.parent.parent.name == SNAPSHOTS and not preferred(path.name for path in folder.iterdir()):
        folder = folder.parent  # a folder of a repository, in which models have folders of their own
    names = preferred(path.name for path in folder.iterdir()) if folder.is_dir() else []
    own = [name for name in names if _stem(name) and model.name.lower().startswith(_stem(name))]
    for name in own or [name for name in names if not _stem(name)]:
        from mlc_amd.compiler.gguf.mmproj import VisionFile

        try:
            VisionFile(folder / name).close()
        except UserError as error:
            display.message(f"the model is compiled without its image encoder: {error}")
            return None
        return str(folder / name)
    return None


def _stem(name: str) -> str:
    """The part of an encoder's name that refers to its model: "qwen3-vl-8b" of mmproj-Qwen3-VL-8B-F16.gguf; "" if there
    is none."""
    words = _TYPE.sub("", name.lower()).removesuffix(".gguf").replace(WORD, "").strip("-_.")
    return words.removesuffix("model").strip("-_.")
