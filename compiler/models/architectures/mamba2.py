"""mamba2: Mamba-2, Codestral Mamba. Every layer is a selective state space, without a feed-forward block."""

from mlc_amd.compiler.models.config import LayerConfig, Mamba2Config, ModelConfig
from mlc_amd.compiler.models.keys import Keys
from mlc_amd.compiler.models.metadata import check_multiple, read_layers, read_model, read_taps
from mlc_amd.compiler.models.registry import architecture

VECTOR = 16  # columns that kernels take at once


@architecture("mamba2")
def read(keys: Keys) -> ModelConfig:
    return read_model(keys, [LayerConfig(read_mamba2(keys), None)] * read_layers(keys), {})


def read_mamba2(keys: Keys, norm: bool = True) -> Mamba2Config:
    """The state space, the same in all layers that have one. norm: whether it has one."""
    inner, state = keys.integer("ssm.inner_size"), keys.integer("ssm.state_size")
    heads, groups = keys.integer("ssm.time_step_rank"), keys.integer("ssm.group_count")
    for what, size, by in (("inner size", inner, heads), ("heads", heads, groups)):
        if size % by:
            raise keys.error(f"the state space's {what} ({size}) must be a multiple of {by} to be compiled")
    check_multiple(keys, "inner size of the state space", inner)
    check_multiple(keys, "columns of a head of the state space", inner // heads, VECTOR)
    check_multiple(keys, "columns of a group of the state space", inner // groups, VECTOR)
    check_multiple(keys, "state's size", state, VECTOR)
    eps = keys.number("attention.layer_norm_rms_epsilon") if norm else 0.0
    return Mamba2Config(inner, state, heads, groups, read_taps(keys, "ssm.conv_kernel"), eps)
