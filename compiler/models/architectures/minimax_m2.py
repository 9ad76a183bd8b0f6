"""minimax-m2: MiniMax M2. Partial RoPE, RMS norms over all of q and all of k; experts in every layer, chosen by sigmoid
and a bias."""

from mlc_amd.compiler.models.config import ModelConfig
from mlc_amd.compiler.models.keys import Keys
from mlc_amd.compiler.models.metadata import read_experts, read_uniform
from mlc_amd.compiler.models.registry import architecture


@architecture("minimax-m2")
def read(keys: Keys) -> ModelConfig:
    experts = read_experts(keys, keys.integer("feed_forward_length"), gating="sigmoid", selection_bias=True)
    return read_uniform(keys, neox=True, feed_forward=experts, row_norms=True)
