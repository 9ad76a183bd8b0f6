"""MiniCPM-V 4.6 with 4 patches a token: SigLIP, positions in buckets, 2 x 2 patches merged after a norm."""

from mlc_amd.compiler.models.metadata import Keys
from mlc_amd.compiler.models.vision.registry import merge, projector


def project(g, x):
    x = g.norm(g.merged(x), "mm.input_norm")
    return g.linear(g.activation(g.linear(x, "mm.up.weight"), "gelu_erf"), "mm.down.weight")


@projector("minicpmv4_6", project)
def minicpmv4_6(keys: Keys) -> dict:
    merged = merge(keys, "projector.scale_factor", 4)
    if merged != 2:
        raise keys.error(f"{keys.full('projector.scale_factor')} is {merged}: only encoders with 2 are supported")
    return {"merge": merged, "table": "buckets", "least": 1, "most": 1024}
