"""GLM-4V: a norm of patches, interpolated and rotary positions, a convolution of 2 x 2 patches, a gated block."""

from mlc_amd.compiler.models.metadata import Keys
from mlc_amd.compiler.models.vision.config import Turns
from mlc_amd.compiler.models.vision.encoder import gated
from mlc_amd.compiler.models.vision.prepare import patches_first
from mlc_amd.compiler.models.vision.registry import merge, projector


def project(g, x):
    x = g.linear(g.merged(x), "mm.patch_merger.weight")
    x = g.norm(g.linear(x, "mm.model.fc.weight"), "mm.post_norm", eps=1e-5, kind="layer")
    return gated(g, g.activation(x, "gelu_erf"), "mm.{}")


def prepare(config, tensors):
    patches_first(tensors, "mm.patch_merger.weight", config.merge**2)


@projector("glm4v", project, prepare)
def glm4v(keys: Keys) -> dict:
    table = "cubic" if "v.position_embd.weight" in keys.tensors else ""
    return {
        "norm": "rms", "merge": merge(keys, "spatial_merge_size", 2), "table": table, "turns": Turns("yx", "whole"),
        "positions": "grid", "least": 8, "most": 4096,
    }  # fmt: skip
