"""PaddleOCR-VL: interpolated and rotary positions, a norm of each patch, 2 x 2 patches merged."""

from mlc_amd.compiler.models.metadata import Keys
from mlc_amd.compiler.models.vision.config import Turns
from mlc_amd.compiler.models.vision.encoder import mlp
from mlc_amd.compiler.models.vision.registry import projector, tokens_of_pixels

MERGE = 2


def project(g, x):
    return mlp(g, g.merged(g.norm(x, "mm.input_norm", eps=1e-5, kind="layer")), "mm.1", "mm.2", g.vision.act)


@projector("paddleocr", project)
def paddleocr(keys: Keys) -> dict:
    own = {"merge": MERGE, "table": "smooth", "turns": Turns("yx", "whole"), "positions": "grid"}
    return own | tokens_of_pixels(keys, MERGE)
