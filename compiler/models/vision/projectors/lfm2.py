"""LFM2-VL: SigLIP 2 at the image's own shape, squares of patches side by side, a norm where the file has one."""

from mlc_amd.compiler.models.metadata import Keys
from mlc_amd.compiler.models.vision.encoder import mlp
from mlc_amd.compiler.models.vision.registry import merge, projector


def project(g, x):
    return mlp(g, g.optional_norm(g.merged(x), "mm.input_norm", eps=1e-5), "mm.1", "mm.2")


@projector("lfm2", project)
def lfm2(keys: Keys) -> dict:
    return {"merge": merge(keys, "projector.scale_factor", 2), "table": "smooth", "least": 64, "most": 256}
