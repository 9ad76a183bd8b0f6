"""ernie4_5: ERNIE 4.5, dense. As llama."""

from mlc_amd.compiler.models.config import ModelConfig
from mlc_amd.compiler.models.keys import Keys
from mlc_amd.compiler.models.metadata import read_uniform
from mlc_amd.compiler.models.registry import architecture


@architecture("ernie4_5")
def read(keys: Keys) -> ModelConfig:
    return read_uniform(keys, neox=False)
