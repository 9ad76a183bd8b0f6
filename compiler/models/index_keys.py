"""Which layers choose the keys that their rows attend to, for a capacity of tokens, and the caches of the keys for this
choice.

If a sequence has no more tokens than a row may attend to, rows attend to all of them, and there is no indexer.
"""

from typing import Any

from mlc_amd.compiler.models.compressed.config import CompressedConfig
from mlc_amd.compiler.models.config import AttentionConfig, ModelConfig
from mlc_amd.schedules.operators import SelectKeys


def chooses(attention: AttentionConfig | None, ctx: int) -> bool:
    """Whether rows of the layer attend to some keys only, in sequences of up to ctx tokens."""
    return bool(attention and attention.indexer and attention.indexer.used < ctx)


def operator(attention: AttentionConfig, ctx: int, m: int) -> SelectKeys:
    """The operator that chooses keys, in a step of m rows."""
    of = attention.indexer
    assert of, "a layer with an indexer"
    used = of.used // of.block + (of.block > 1 and not of.by_head)
    block: dict[str, Any] = {"block": of.block, "by_head": of.by_head, "local": of.local}
    return SelectKeys(heads=of.heads, d=of.dim, used=used, ctx=ctx, m=m, **block)


def averages(config: ModelConfig, ctx: int) -> dict[str, tuple[int, ...]]:
    """{name: shape} of the states of layers whose blocks have the mean of their keys: the last keys."""
    found = {i: a.indexer for i, layer in enumerate(config.layers) if (a := layer.attention) and chooses(a, ctx)}
    return {f"mean.{i}": (of.block - 1, of.dim) for i, of in found.items() if of and of.block > 1 and not of.by_head}


def compressed_caches(config: ModelConfig, ctx: int) -> dict[str, tuple[int, ...]]:
    """{name: shape} of the float16 caches of layers with attention to compressed keys."""
    layers = {i: a for i, layer in enumerate(config.layers) if isinstance(a := layer.mixer, CompressedConfig)}
    return {f"{name}.{i}": shape for i, a in layers.items() for name, shape in a.caches(ctx).items()}


def indexers(config: ModelConfig, ctx: int) -> dict[str, SelectKeys]:
    """{name: operator for one row} for the cache of each layer with an indexer of its own."""
    layers = {i: a for i, layer in enumerate(config.layers) if (a := layer.attention) and chooses(a, ctx)}
    return {f"ik.{i}": operator(a, ctx, 1) for i, a in layers.items() if a.indexer and a.indexer.own}
