"""Pixtral: rotary positions, patches merged (Mistral Small 3.1), a learned row after each row of tokens. LightOnOCR:
the same without that row."""

from typing import Any

from mlc_amd.compiler.models.metadata import Keys
from mlc_amd.compiler.models.vision.config import Turns
from mlc_amd.compiler.models.vision.encoder import mlp
from mlc_amd.compiler.models.vision.prepare import patches_first
from mlc_amd.compiler.models.vision.registry import merge, projector

MERGER = "mm.patch_merger.weight"


def project(g, x):
    if g.has(MERGER):
        x = g.linear(g.merged(g.norm(x, "mm.input_norm")), MERGER)
    return mlp(g, x, "mm.1", "mm.2")


def prepare(config, tensors):
    if MERGER in tensors:
        patches_first(tensors, MERGER, config.merge**2)


def _common(keys: Keys) -> dict[str, Any]:
    merged = merge(keys, "spatial_merge_size", 1)
    if (merged > 1) != (MERGER in keys.tensors):
        raise keys.error(f"{keys.full('spatial_merge_size')} is {merged}, which does not go with the file's tensors")
    return {"norm": "rms", "merge": merged, "turns": Turns("yx", "adjacent", odd=True), "least": 8}


@projector("pixtral", project, prepare)
def pixtral(keys: Keys) -> dict:
    return _common(keys) | {"breaks": "v.token_embd.img_break" in keys.tensors, "most": 1024}


@projector("lightonocr", project, prepare)
def lightonocr(keys: Keys) -> dict:
    found = _common(keys)
    side = keys.integer("image_size") // keys.integer("patch_size") // found["merge"]
    return found | {"most": min(side * side, 4096)}
