"""Multi-token prediction (MTP): a further layer of a model that guesses the token after the next one.

Of a row with the token at position p, the decoder's x_p and the next token t:

    h' = eh_proj [norm(embedding of t) | norm(h)]      norms enorm and hnorm; h = output_norm(x_p)
    y = shared_head_norm(layer(h'))                    attention among the rows of this layer, at position p
    logits of the token after t = shared_head_head y

where the embedding, the last norm and the last matrix are the decoder's if the layer has none of its own. For a guess
after that one, y takes the place of h, and the guessed token that of t.

So llama.cpp computes it (graph_mtp in src/models/qwen35.cpp, glm4-moe.cpp, deepseek2.cpp): the decoder's h is the one
after its last norm, and so is the output of a guess. There the row of t stands at the position of t instead of p,
which is the same, as RoPE knows distances only.
"""

from mlc_amd.compiler.functions import DRAFTED
from mlc_amd.compiler.models.graph import Graph
from mlc_amd.compiler.models.transformer import decoder_layer, head


def predictor(g: Graph):
    """The logits of the rows that the function answers; g.drafted is y of all rows."""
    c, i = g.config, g.config.predictor
    assert i is not None, "a model with a layer that predicts"
    layer, own = c.layers[i], f"blk.{i}.nextn."
    has = layer.predictor
    assert has
    output = "token_embd.weight" if c.tied else "output.weight"
    h = g.gathered(DRAFTED) if g.spec.chained else g.norm(g.kept_hidden, c.output_norm)
    e = g.embed(own + "embed_tokens.weight" if has.embedding else "token_embd.weight", c.embedding_scale)
    x = g.linear(
        g.joined(g.rms_norm(e, own + "enorm.weight"), g.rms_norm(h, own + "hnorm.weight")), own + "eh_proj.weight"
    )
    x = decoder_layer(g, x, i, layer)
    norm = own + "shared_head_norm" if has.norm else c.output_norm
    g.drafted = g.norm(x, norm)
    return head(g, x, norm, own + "shared_head_head.weight" if has.head else output)
