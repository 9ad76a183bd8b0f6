"""LLaVA (`mlp`): CLIP with a class token, without its last layer. Janus-Pro: SigLIP. Both with two matrices."""

from mlc_amd.compiler.models.metadata import Keys
from mlc_amd.compiler.models.vision.encoder import mlp
from mlc_amd.compiler.models.vision.registry import projector, tile


def two_matrices(g, x):
    return mlp(g, x, "mm.0", "mm.2") if g.has("mm.2.weight") else g.activation(g.linear(x, "mm.0.weight"), "gelu")


def project_janus(g, x):
    return mlp(g, x, "mm.0", "mm.1", g.vision.act)


@projector("mlp", two_matrices)
def llava(keys: Keys) -> dict:
    layers = keys.integer("block_count") - 1
    if layers < 1:
        raise keys.error(f"{keys.full('block_count')} is 1: the last layer of this encoder is not used")
    return {"layers": layers, "unused": 1, "table": "rows", "class_row": "first"} | tile(keys, 1)


@projector("janus_pro", project_janus)
def janus_pro(keys: Keys) -> dict:
    return {"table": "rows"} | tile(keys, 1)
