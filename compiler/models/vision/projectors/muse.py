"""Muse Glimmer: windows as large as the square of learned positions, rotary positions, squares of patches side by side
with the patches innermost, three matrices."""

from mlc_amd.compiler.models.metadata import Keys
from mlc_amd.compiler.models.vision.config import Turns
from mlc_amd.compiler.models.vision.encoder import mlp
from mlc_amd.compiler.models.vision.prepare import patches_first
from mlc_amd.compiler.models.vision.registry import merge, projector

EVERY = 4  # layers of which one sees the whole image, as the last one does


def project(g, x):
    x = g.activation(mlp(g, g.merged(x), "mm.0", "mm.1", g.vision.act), g.vision.act)
    return g.linear(x, "mm.2.weight")


def prepare(config, tensors):
    patches_first(tensors, "mm.0.weight", config.merge**2)


@projector("muse-glimmer", project, prepare)
def muse_glimmer(keys: Keys) -> dict:
    layers, merged = keys.integer("block_count"), merge(keys, "spatial_merge_size", 2)
    side = keys.integer("image_size") // keys.integer("patch_size")
    if side % merged:
        raise keys.error(f"windows of {side} patches do not divide into tokens of {merged}")
    return {
        "act": "gelu_erf", "merge": merged, "table": "linear", "turns": Turns("xy", "adjacent", first=1),
        "window": side // merged, "full": (*range(EVERY - 1, layers, EVERY), layers - 1), "least": 1, "most": 4096,
    }  # fmt: skip
