"""Llama 4: a class token, rotary positions, squares of patches side by side, tokens by columns."""

from mlc_amd.compiler.models.metadata import Keys
from mlc_amd.compiler.models.vision.config import Turns
from mlc_amd.compiler.models.vision.encoder import mlp
from mlc_amd.compiler.models.vision.registry import merge, projector, tile


def project(g, x):
    x = g.activation(mlp(g, g.merged(x), "mm.model.mlp.1", "mm.model.mlp.2"), "gelu")
    return g.linear(x, "mm.model.fc.weight")


@projector("llama4", project)
def llama4(keys: Keys) -> dict:
    own = {"table": "rows", "class_row": "last", "turns": Turns("xy", "adjacent", first=1), "by_column": True}
    return own | tile(keys, merge(keys, "projector.scale_factor", 1))
