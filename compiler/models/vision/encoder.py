"""The graph of image encoders: a vision transformer over the patches of packed images, and the projector.

    x = W_patch pixels + b + learned positions, or the class token
    x = x + scale1 * norm(W_o attention(turn(W_q h), turn(W_k h), W_v h))     h = norm(x)     scales, norms of results
    x = x + scale2 * norm(W_down (act(W_gate h) * W_up h))                    h = norm(x)     and gates where a file
    features = project(norm(x))                                                               has them

Rows attend to all rows of their image, or of their window. The names of the file's tensors determine which norms,
scales and gates exist.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlc_amd.compiler.models.vision.registry import projectors

if TYPE_CHECKING:
    from mlc_amd.compiler.models.vision.graph import VisionGraph


def encoder(g: VisionGraph):
    """The rows for the decoder, of as many patches as the function takes."""
    c = g.vision
    x = g.linear(g.patches, "v.patch_embd.weight")
    x = g.optional_norm(x, "v.norm_embd")
    if c.table or c.class_row:
        x = g.add(x, g.added)
    x = g.optional_norm(x, "v.pre_ln")
    deep = []
    for i in range(c.layers):
        x = feed_forward(g, attention(g, x, i), i)
        if c.inner == i + 1:
            x = projectors()[c.projector].between(g, x)
        if i in c.deepstack:
            block = f"v.deepstack.{i}."
            deep.append(mlp(g, g.norm(g.merged(x), block + "norm"), block + "fc1", block + "fc2"))
    y = projectors()[c.projector].project(g, g.optional_norm(x, "v.post_ln"))
    return g.made(g.joined(y, *deep))


def attention(g: VisionGraph, x, i: int):
    block = f"v.blk.{i}."
    h = g.norm(x, block + "ln1")
    q, k, v = queries_keys_values(g, h, block)
    q, k = (g.turned(g.head_norm(one, f"{block}attn_{which}_norm")) for one, which in ((q, "q"), (k, "k")))
    if g.vision.value_norm:
        v = g.grouped_norm(v, g.vision.head_dim)
    y = g.linear(g.attend(q, k, v, i), block + "attn_out.weight")
    return g.add(x, finished(g, y, block, "attn_post_norm", "ls1"))


def queries_keys_values(g: VisionGraph, h, block: str) -> list:
    return [g.linear(h, f"{block}attn_{which}.weight") for which in "qkv"]


def feed_forward(g: VisionGraph, x, i: int):
    block = f"v.blk.{i}."
    h = g.norm(x, block + "ln2")
    if g.has(block + "ffn_gate.weight"):
        y = gated(g, h, block + "ffn_{}")
    else:
        y = mlp(g, h, block + "ffn_up", block + "ffn_down", g.vision.act)
    return g.add(x, finished(g, y, block, "ffn_post_norm", "ls2"))


def finished(g: VisionGraph, y, block: str, norm: str, scale: str):
    """A block's result, after the norm and the scale for which the file has weights."""
    y = g.optional_norm(y, block + norm)
    return g.multiply(y, g.whole_vector(f"{block}{scale}.weight")) if g.has(f"{block}{scale}.weight") else y


def gated(g: VisionGraph, h, name: str):
    """A gated feed-forward block. name: of the matrices, with {} for gate, up and down."""
    gate = g.activation(g.linear(h, name.format("gate") + ".weight"), g.vision.act)
    return g.linear(g.multiply(gate, g.linear(h, name.format("up") + ".weight")), name.format("down") + ".weight")


def mlp(g: VisionGraph, x, first: str, second: str, act: str = "gelu"):
    """Two matrices (names without ".weight") with an activation between them."""
    return g.linear(g.activation(g.linear(x, first + ".weight"), act), second + ".weight")
