"""Idefics 3 and SmolVLM: SigLIP over tiles, squares of patches side by side, and one matrix."""

from mlc_amd.compiler.models.metadata import Keys
from mlc_amd.compiler.models.vision.registry import merge, projector, tile


def project(g, x):
    return g.linear(g.merged(x), "mm.model.fc.weight")


@projector("idefics3", project)
def idefics3(keys: Keys) -> dict:
    return {"table": "rows"} | tile(keys, merge(keys, "projector.scale_factor", 1))
