"""Gemma 3: SigLIP, squares of patches pooled to tokens, and one matrix."""

from mlc_amd.compiler.models.metadata import Keys
from mlc_amd.compiler.models.vision.prepare import transposed
from mlc_amd.compiler.models.vision.registry import merge, projector, tile


def project(g, x):
    x = g.norm(g.pooled(x), "mm.soft_emb_norm", kind="rms")
    return g.linear(x, "mm.input_projection.weight")


def prepare(config, tensors):
    transposed(tensors, "mm.input_projection.weight")


@projector("gemma3", project, prepare)
def gemma3(keys: Keys) -> dict:
    return {"table": "rows", "attention": "image"} | tile(keys, merge(keys, "projector.scale_factor", 4))
