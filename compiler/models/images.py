"""Images in a decoder's graph: their rows replace rows of the embedding, features are added after layers, and their
positions in two dimensions rotate RoPE's pairs.

A row of an image is a negative token. The host writes its features and, if RoPE has sections, its place (t, y, x); all
three are the position for a row of text. Models without an image encoder have none of this.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvm import relax, te

from mlc_amd.compiler.models import exchanges
from mlc_amd.compiler.models.model import Model
from mlc_amd.compiler.ops import tensor_type

if TYPE_CHECKING:
    from mlc_amd.compiler.models.graph import Graph


def has_places(model: Model) -> bool:
    """Whether the rows of images have places in two dimensions. This needs RoPE with sections, and an encoder whose
    rows do not simply follow each other like tokens (as MiniCPM-V's do)."""
    places = model.vision is None or model.vision.config.positions == "grid"
    return model.features > 0 and places and any(rope.sections for rope in model.config.ropes.values())


def features_type(model: Model, target) -> str:
    """The dtype of features: float16 if they cross a bus and come from products that are rounded to float16 anyway."""
    return "float32" if target.kind == "cpu" or model.vision is None or model.vision.exact else "float16"


def features(g: Graph) -> relax.Var:
    """The encoder's features of the step's rows of images: [m, features]."""
    return g.parameter("features", "io", tensor_type((g.m, g.model.features), features_type(g.model, g.target)))


def inputs(g: Graph) -> relax.Var:
    """The rows before the first layer."""
    place(g)
    return g.embed("token_embd.weight", g.config.embedding_scale, features(g) if g.model.features else None)


def deepstack(g: Graph, x, layer: int) -> relax.Var:
    """x, the rows after that layer, plus the features of images for this layer."""
    first = (1 + layer) * g.config.hidden
    if first >= g.model.features:
        return x

    def add_features(tokens, features, x):
        def element(row, column):
            return x[row, column] + te.if_then_else(
                tokens[row] < 0, features[row, first + column].astype("float32"), 0.0
            )

        return te.compute(x.shape, element, "deepstack")

    arguments = g.tokens, features(g), exchanges.whole(g, x)
    return g.bb.emit_te(add_features, *arguments, primfunc_name_hint="add_features")


def place(g: Graph) -> None:
    """Replaces RoPE's tables by position by tables of the step's rows, if rows have places in two dimensions."""
    ropes = {name: rope for name, rope in g.config.ropes.items() if rope.sections} if has_places(g.model) else {}
    for name, rope in ropes.items():

        def rope_angles(places, table, rope=rope):
            def element(row, column):
                place = places[row, 0]
                for component, holds in rope.components(column // 2):
                    place = te.if_then_else(holds, places[row, component], place)
                return table[te.max(te.min(place, g.ctx - 1), 0), column]

            return te.compute((g.m, rope.dim), element, "angles")

        places, table = g.parameter("places", "io", tensor_type((g.m, 3), "int32")), g.parameters[f"{name}.table"][0]
        g.row_tables[name] = g.bb.emit_te(rope_angles, places, table, primfunc_name_hint="rope_angles")
