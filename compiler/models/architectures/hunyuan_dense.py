"""hunyuan-dense: Hunyuan, dense. RMS norms over the heads of q and k after RoPE, whose base grows with alpha."""

from mlc_amd.compiler.models.config import LayerConfig, ModelConfig
from mlc_amd.compiler.models.keys import Keys
from mlc_amd.compiler.models.metadata import ROPE, read_attention, read_feed_forward, read_layers, read_model, read_rope
from mlc_amd.compiler.models.registry import architecture


@architecture("hunyuan-dense")
def read(keys: Keys) -> ModelConfig:
    mixer = read_attention(keys, head_norms=True, norm_after_rope=True)
    base, alpha = keys.number("rope.freq_base", 10000.0), keys.number("rope.scaling.alpha", 0.0, minimum=0.0)
    if alpha:
        base *= alpha ** (mixer.head_dim / (mixer.head_dim - 2))
    layers = [LayerConfig(mixer, read_feed_forward(keys))] * read_layers(keys)
    return read_model(keys, layers, {ROPE: read_rope(keys, mixer.head_dim, neox=True, base=base)})
