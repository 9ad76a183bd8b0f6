"""glm4: GLM 4. Partial RoPE, RMS norms before and after each block, merged gate and up."""

from mlc_amd.compiler.models.config import LayerConfig, ModelConfig, Norms
from mlc_amd.compiler.models.keys import Keys
from mlc_amd.compiler.models.metadata import ROPE, read_attention, read_feed_forward, read_layers, read_model, read_rope
from mlc_amd.compiler.models.registry import architecture


@architecture("glm4")
def read(keys: Keys) -> ModelConfig:
    mixer, block = read_attention(keys), read_feed_forward(keys, merged=True)
    layer = LayerConfig(
        mixer=mixer,
        feed_forward=block,
        mixer_norms=Norms("attn_norm", "post_attention_norm"),
        feed_forward_norms=Norms("ffn_norm", "post_ffw_norm"),
    )
    # sections are those of images, which pair columns as NeoX does; the angles of text are the same in all of them
    rope = read_rope(keys, mixer.head_dim, neox=keys.has("rope.dimension_sections"))
    return read_model(keys, [layer] * read_layers(keys), {ROPE: rope})
