"""Kimi-VL: MoonViT with interpolated and rotary positions, a norm of each patch, 2 x 2 patches merged."""

from mlc_amd.compiler.models.metadata import Keys
from mlc_amd.compiler.models.vision.config import Turns
from mlc_amd.compiler.models.vision.encoder import mlp
from mlc_amd.compiler.models.vision.registry import merge, projector


def project(g, x):
    return mlp(g, g.merged(g.norm(x, "mm.input_norm", eps=1e-5)), "mm.1", "mm.2")


@projector("kimivl", project)
def kimivl(keys: Keys) -> dict:
    merged = merge(keys, "projector.scale_factor", 2)
    return {"merge": merged, "table": "smooth", "turns": Turns("xy", "adjacent"), "least": 8, "most": 1024}
