"""phi3: Phi 3 and 4. Merged matrices for q, k and v and for gate and up; two sets of RoPE factors, for short and for
long contexts. The sliding window in the metadata is ignored, as by llama.cpp."""

from mlc_amd.compiler.models.config import ModelConfig
from mlc_amd.compiler.models.keys import Keys
from mlc_amd.compiler.models.metadata import read_feed_forward, read_uniform
from mlc_amd.compiler.models.registry import architecture


@architecture("phi3")
def read(keys: Keys) -> ModelConfig:
    block = read_feed_forward(keys, merged=True)
    return read_uniform(keys, neox=True, feed_forward=block)
