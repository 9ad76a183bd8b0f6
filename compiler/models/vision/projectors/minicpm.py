"""MiniCPM-V 4.6: SigLIP, positions in buckets, 2 x 2 patches merged after a norm. With 16 patches a token 2 x 2 of them
are also merged between two layers, after attention within these."""

from mlc_amd.compiler.models.metadata import MAX_LAYERS, Keys
from mlc_amd.compiler.models.vision.encoder import mlp, queries_keys_values
from mlc_amd.compiler.models.vision.registry import merge, projector

MERGER = "v.vit_merger."


def between(g, x):
    q, k, v = queries_keys_values(g, g.norm(x, MERGER + "ln1"), MERGER)
    x = g.add(x, g.linear(g.attend(q, k, v, None), MERGER + "attn_out.weight"))
    y = mlp(g, g.norm(g.merged(x), MERGER + "ds_ln"), MERGER + "ds_ffn_up", MERGER + "ds_ffn_down")
    return g.add(g.pooled(x), y)


def project(g, x):
    return mlp(g, g.norm(g.merged(x), "mm.input_norm"), "mm.up", "mm.down", "gelu_erf")


@projector("minicpmv4_6", project, between=between)
def minicpmv4_6(keys: Keys) -> dict:
    merged, inner = merge(keys, "projector.scale_factor", 4), 0
    if merged not in (2, 4):
        raise keys.error(f"{keys.full('projector.scale_factor')} is {merged}: only 2 and 4 are possible")
    if merged == 4:
        found = keys.metadata.get(keys.full("wa_layer_indexes"), [0])
        first = found[0] if isinstance(found, list) and found else 0
        if not isinstance(first, int) or not 0 <= first < keys.integer("block_count", maximum=MAX_LAYERS):
            raise keys.error(f"{keys.full('wa_layer_indexes')} names no layer; convert the model again")
        inner = first + 1
    return {"merge": merged, "inner": inner, "table": "buckets", "least": 1, "most": 1024}
