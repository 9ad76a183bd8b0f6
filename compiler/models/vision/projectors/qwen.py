"""Qwen 2, 2.5 and 3: rotary positions in two dimensions, 2 x 2 patches merged; windows (2.5), interpolated positions
and features for the decoder's first layers (3)."""

from typing import Any

from mlc_amd.compiler.models.metadata import Keys
from mlc_amd.compiler.models.vision.config import Turns
from mlc_amd.compiler.models.vision.encoder import mlp
from mlc_amd.compiler.models.vision.registry import merge, projector

WINDOW = 112  # pixels


def project(g, x):
    return mlp(g, g.merged(x), "mm.0", "mm.2")


def _common(keys: Keys) -> dict[str, Any]:
    return {
        "merge": merge(keys, "spatial_merge_size", 2), "turns": Turns("yx", "whole"), "positions": "grid", "least": 8,
        "most": 4096,
    }  # fmt: skip


@projector("qwen2vl_merger", project)
def qwen2vl(keys: Keys) -> dict:
    return _common(keys)


@projector("qwen2.5vl_merger", project)
def qwen25vl(keys: Keys) -> dict:
    found, every = _common(keys), keys.integer("n_wa_pattern", minimum=0)
    window = WINDOW // keys.integer("patch_size") // found["merge"] if every else 0
    full = tuple(range(every - 1, keys.integer("block_count"), every)) if every else ()
    return found | {"norm": "rms", "window": window, "full": full}


@projector("qwen3vl_merger", project)
def qwen3vl(keys: Keys) -> dict:
    layers = range(keys.integer("block_count"))
    deepstack = tuple(i for i in layers if f"v.deepstack.{i}.fc1.weight" in keys.tensors)
    return _common(keys) | {"table": "aligned", "deepstack": deepstack}
