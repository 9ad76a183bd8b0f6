"""InternVL: a class token, scaled layers, tiles, squares of patches side by side."""

from mlc_amd.compiler.models.metadata import Keys
from mlc_amd.compiler.models.vision.encoder import mlp
from mlc_amd.compiler.models.vision.registry import merge, projector, tile

LARGE = 3200, 45  # columns and layers of the 6B encoder, whose norms are RMS norms


def project(g, x):
    x = g.norm(g.merged(x), "mm.model.mlp.0", eps=1e-5, kind="layer")
    return mlp(g, x, "mm.model.mlp.1", "mm.model.mlp.3")


@projector("internvl", project)
def internvl(keys: Keys) -> dict:
    large = (keys.integer("embedding_length"), keys.integer("block_count")) == LARGE
    own = {"norm": "rms" if large else "layer", "table": "rows", "class_row": "last"}
    return own | tile(keys, merge(keys, "projector.scale_factor", 1))
