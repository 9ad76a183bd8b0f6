"""Step3-VL: interpolated and rotary positions, two convolutions, one matrix."""

from mlc_amd.compiler.models.metadata import Keys
from mlc_amd.compiler.models.vision.config import NEIGHBOURS, Turns
from mlc_amd.compiler.models.vision.prepare import patches_first
from mlc_amd.compiler.models.vision.registry import merge, projector

MERGE = 4


def project(g, x):
    return g.linear(g.convolved(g.convolved(x, "mm.0.weight"), "mm.1.weight"), "mm.model.fc.weight")


def prepare(config, tensors):
    for name in ("mm.0.weight", "mm.1.weight"):
        patches_first(tensors, name, NEIGHBOURS)


@projector("step3vl", project, prepare)
def step3vl(keys: Keys) -> dict:
    if (merged := merge(keys, "projector.scale_factor", MERGE)) != MERGE:
        raise keys.error(f"{keys.full('projector.scale_factor')} is {merged}: only {MERGE} is possible")
    side = keys.integer("image_size", maximum=1 << 16) // keys.integer("patch_size", maximum=256) // MERGE
    return {
        "merge": MERGE, "convolved": True, "table": "smooth", "turns": Turns("xy", "adjacent"), "least": 1,
        "most": max(side * side, 1),
    }  # fmt: skip
