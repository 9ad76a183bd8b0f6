"""Emits encoders of texts: the rows of many texts in one step, without a cache.

    x = embedding of the token, its position and its type, normalized        each where the model has it
    x = the layers of transformer.py, whose attention is among the rows of a text
    y = for each answer the mean of some rows of norm(x)                     `pooled` int32 [m, 2]: first row, end
    y = W_i y ..., the layers of the head

`segments` int32 [m, 2] has the first row and the end of each row's text, `rows` its position in that, `answers` the
number of answers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tvm import relax

from mlc_amd.compiler.models import decoder_parts, transformer
from mlc_amd.compiler.ops import tensor_type
from mlc_amd.schedules.operators import Pool

if TYPE_CHECKING:
    from mlc_amd.compiler.models.graph import Graph

OPS: Any = relax.op


def encoder(g: Graph):
    """The vector of each answer, float32 [m, columns]."""
    c, e = g.config, g.config.encoder
    assert e, "an encoder"
    x = g.embed("token_embd.weight", c.embedding_scale)
    if e.types:
        x = g.add(x, _row(g, "token_types.weight"))
    x = decoder_parts.embedding(g, x)
    x = transformer.layers(g, g.norm(x, "token_embd_norm") if e.norm else x)
    x = g.norm(x, c.output_norm) if c.output_norm else x
    g.state = g.parameter("answers", "io", tensor_type((4,), "int32"))
    y = g.emit(Pool(k=c.hidden, m=g.m), [g.parameter("pooled", "io", tensor_type((g.m, 2), "int32")), x])
    for layer in e.head:
        y = g.linear(g.columns(y, 0, g.model.tensors[f"{layer.name}.weight"].shape[-1]), f"{layer.name}.weight")
        y = g.activation(y, layer.act) if layer.act else y
        y = g.norm(g.columns(y, 0, layer.rows), f"{layer.name}.norm") if layer.norm else y
    return y


def _row(g: Graph, name: str) -> relax.Var:
    """The first row of a table, repeated for all rows."""
    return decoder_parts.embedded(g, name, g.bb.emit(OPS.zeros((g.m,), "int32")))
