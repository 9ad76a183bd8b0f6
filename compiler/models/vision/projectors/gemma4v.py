"""Gemma 4: learned positions along both axes, rotary ones, norms of q, k and v, pooling, and one matrix."""

from mlc_amd.compiler.models.metadata import Keys
from mlc_amd.compiler.models.vision.config import Turns
from mlc_amd.compiler.models.vision.prepare import centered_pixels
from mlc_amd.compiler.models.vision.registry import merge, projector

THETA = 100.0


def project(g, x):
    x = g.pooled(x, g.vision.hidden**0.5)
    if g.has("v.std_bias"):
        x = g.multiply(g.subtract(x, g.whole_vector("v.std_bias")), g.whole_vector("v.std_scale"))
    return g.linear(g.grouped_norm(x, g.vision.hidden), "mm.input_projection.weight")


@projector("gemma4v", project, lambda config, tensors: centered_pixels(tensors))
def gemma4v(keys: Keys) -> dict:
    return {
        "norm": "rms", "merge": merge(keys, "projector.scale_factor", 3), "scale": 1.0, "value_norm": True,
        "table": "axes", "turns": Turns("xy", "half", theta=THETA), "attention": "image", "least": 70, "most": 1120,
    }  # fmt: skip
