"""olmoe: OLMoE. RMS norms over all of q and all of k; experts in every layer, whose weights do not add up to 1."""

from mlc_amd.compiler.models.config import ModelConfig
from mlc_amd.compiler.models.keys import Keys
from mlc_amd.compiler.models.metadata import read_experts, read_uniform
from mlc_amd.compiler.models.registry import architecture


@architecture("olmoe")
def read(keys: Keys) -> ModelConfig:
    experts = read_experts(keys, keys.integer("feed_forward_length"), gating="softmax", normalize=False)
    return read_uniform(keys, neox=True, feed_forward=experts, row_norms=True)
