"""The registry of projectors, by GGUF's `clip.projector_type`, and the reader of an encoder's metadata.

Files in compiler/models/vision/projectors register functions:

    @projector("gemma3", project)
    def gemma3(keys: Keys) -> dict: ...         the fields of VisionConfig that are its own
"""

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from mlc_amd.compiler.models.metadata import MAX_LAYERS, Keys
from mlc_amd.compiler.models.registry import all_of
from mlc_amd.compiler.models.vision.config import VisionConfig
from mlc_amd.runtime.errors import shorten

FILES = "mlc_amd.compiler.models.vision.projectors"
SIZE = 1 << 20  # upper limit of an encoder's sizes; a file with more is damaged
GRID = 1024  # upper limit of patches along a side of an image


@dataclass(frozen=True)
class Projector:
    """read: the fields of VisionConfig that are the projector's own. project: emits what follows the layers, through a
    VisionGraph. prepare: changes the tensors, by name, before the graph reads them. between: emits what follows layer
    `inner`."""

    read: Callable[[Keys], dict[str, Any]]
    project: Callable[[Any, Any], Any]
    prepare: Callable[[VisionConfig, Any], None]
    between: Callable[[Any, Any], Any]


_registered: dict[str, Projector] = {}


def projector(name: str, project, prepare=lambda config, tensors: None, between=lambda g, x: x) -> Callable:
    """Registers the projector `name`; the decorated function reads its metadata. Arguments: see `Projector`."""

    def register(read):
        _registered[name] = Projector(read, project, prepare, between)
        return read

    return register


@functools.cache
def projectors() -> Mapping[str, Projector]:
    return all_of(FILES, _registered)


def read_vision(metadata: dict[str, object], tensors: Collection[str], path: str) -> VisionConfig:
    """The configuration of an encoder. Raises UserError (beginning with `path`) for a value that is missing, impossible
    or of a wrong type, and for what is not supported."""
    keys = Keys(metadata, tensors, path)
    name = keys.string("general.architecture")
    if name != "clip":
        raise keys.error(f"this file holds a model of architecture {shorten(name)}, not an image encoder (clip)")
    keys.prefix = "clip"
    if not keys.flag("has_vision_encoder", True):
        raise keys.error("this file has no image encoder; use another mmproj file")
    kind = keys.string("projector_type" if keys.has("projector_type") else "vision.projector_type")
    if kind not in projectors():
        raise keys.error(f"projector {shorten(kind)} is not supported; supported are {', '.join(projectors())}")
    if keys.has("vision.feature_layer"):
        raise keys.error(f"features of several layers ({keys.full('vision.feature_layer')}) are not supported")
    gelu, silu = keys.flag("use_gelu", False), keys.flag("use_silu", False)
    keys.prefix = "clip.vision"
    common: dict[str, Any] = {
        "projector": kind, "hidden": keys.integer("embedding_length", maximum=SIZE),
        "layers": keys.integer("block_count", maximum=MAX_LAYERS), "heads": keys.integer("attention.head_count"),
        "eps": keys.number("attention.layer_norm_epsilon", minimum=0), "patch": keys.integer("patch_size", maximum=256),
        "image": keys.integer("image_size", maximum=1 << 16),
        "act": "gelu" if gelu else "silu" if silu else "quick_gelu",
    }  # fmt: skip
    found = VisionConfig(**common | projectors()[kind].read(keys))
    if found.hidden % found.heads or found.head_dim % 8 or found.hidden % 16:
        raise keys.error(
            f"{found.heads} heads and {found.hidden} columns are not supported: heads of 8, 16, 24 .. columns are"
        )
    if found.image // found.patch > GRID or found.image < found.patch:
        raise keys.error(f"images of {found.image} pixels are not supported with patches of {found.patch}")
    return found


def merge(keys: Keys, key: str, default: int | None = None) -> int:
    """Patches of a token along each axis."""
    return keys.integer(key, default, maximum=16)


def tokens_of_pixels(keys: Keys, merged: int) -> dict[str, Any]:
    """Fields for an encoder whose file states the number of pixels of an image."""
    size = (merged * keys.integer("patch_size", maximum=256)) ** 2
    least, most = (keys.integer(f"image_{which}_pixels", maximum=1 << 28) for which in ("min", "max"))
    return {"least": max(least // size, 1), "most": min(max(most // size, 1), 4096)}


def tile(keys: Keys, merged: int) -> dict[str, Any]:
    """Fields for an encoder whose images are squares of the size in the file."""
    side = -(-(keys.integer("image_size", maximum=1 << 16) // keys.integer("patch_size", maximum=256)) // merged)
    return {"merge": merged, "least": side * side, "most": side * side}
