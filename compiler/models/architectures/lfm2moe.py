"""lfm2moe: LFM2 and LFM2.5 with experts after the leading dense layers, chosen by sigmoid (which
the file says) and a bias."""

from mlc_amd.compiler.models.architectures.lfm2 import OUTPUT_NORM, read_mixers
from mlc_amd.compiler.models.config import LayerConfig, ModelConfig
from mlc_amd.compiler.models.keys import Keys
from mlc_amd.compiler.models.metadata import feed_forward, read_experts, read_model
from mlc_amd.compiler.models.registry import architecture


@architecture("lfm2moe")
def read(keys: Keys) -> ModelConfig:
    mixers, ropes = read_mixers(keys)
    experts = read_experts(keys, keys.integer("expert_feed_forward_length"), selection_bias=True)
    dense = feed_forward(keys, keys.integer("feed_forward_length"))
    leading = keys.integer("leading_dense_block_count", 0, minimum=0)
    layers = [LayerConfig(mixer, dense if i < leading else experts) for i, mixer in enumerate(mixers)]
    return read_model(keys, layers, ropes, output_norm=OUTPUT_NORM)
