"""Divides a model between GPUs by tensor: each GPU has some heads of a mixer, some columns between the matrices of a
feed-forward block or an expert, and some rows of the vocabulary's matrix.

In: a model, and the number of GPUs. Out: `ShardedModel`, from which the graph emits the functions that all GPUs run.
Its configuration and tensor shapes are those of one GPU's part; all parts have the same. If a size cannot be divided
evenly, the last parts are padded with zeros. Mixers whose heads cannot be divided are computed by every GPU as a whole.

The product with a matrix whose columns are divided is one term of a sum (`sums`); the graph emits the sum. The product
with the rows of the vocabulary's matrix is some columns of the logits (`joins`).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mlc_amd.compiler.gguf.tensor import Ranges, Tensor
from mlc_amd.compiler.models.config import (
    AttentionConfig,
    ExpertsConfig,
    FeedForwardConfig,
    LayerConfig,
    ModelConfig,
    SharedExpertConfig,
)
from mlc_amd.compiler.models.recurrent_config import (
    ChannelDeltaConfig,
    DeltaNetConfig,
    Mamba2Config,
)
from mlc_amd.runtime.artifact.manifest import RANK
from mlc_amd.schedules.formats import FORMATS

BLOCK = 32  # rows and columns of a part are multiples of this


@dataclass(frozen=True)
class Cut:
    """How a tensor is divided: GPU `rank` has the ranges parts[rank] along an axis, padded with zeros to `whole`.

    axis: "rows" of each matrix, "columns", "matrices", or "none": the first GPU has the whole tensor, the others zeros
    (for what is added to a sum once).
    """

    axis: str
    parts: Sequence[Ranges] = ()
    whole: int = 0

    def of(self, tensor: Tensor, rank: int) -> Tensor:
        name = named(tensor.name, rank)
        if self.axis == "rows":
            return tensor.some_rows(name, self.parts[rank], self.whole)
        if self.axis == "columns":
            return tensor.some_columns(name, self.parts[rank], self.whole)
        if self.axis == "matrices":
            return tensor.some_matrices(name, self.parts[rank])
        return tensor.zeros(name) if rank else tensor


Cuts = dict[str, Cut]  # by name of a tensor within the layer


def named(name: str, rank: int) -> str:
    """The name of a GPU's part of a tensor."""
    return f"{name}{RANK}{rank}" if rank else name


def parts_of(model: Any, name: str) -> list[str]:
    """The names of a tensor's parts on all GPUs. If all GPUs have the same tensor: its own name."""
    return [one for rank in range(model.gpus) if (one := named(name, rank)) in model.tensors]


class ShardedModel:
    """A divided model, with the interface of `Model`. gpus: number of parts. whole: the undivided model. tensors: those
    of the first part, and, under names of `named`, those tensors of the other parts that differ."""

    def __init__(self, model: Any, gpus: int):
        self.whole, self.gpus = model, gpus
        divided, cuts = _divided(model.config, model.tensors, gpus)
        self.tensors: dict[str, Tensor] = dict(model.tensors)
        output = "output.weight"
        if model.config.tied:  # the output's rows are divided, but the embedding stays whole
            self.tensors[output] = _alias(model.tensors["token_embd.weight"], output)
            divided = replace(divided, tied=False)
        vocabulary = [output, *(name for name in model.tensors if name.endswith(".shared_head_head.weight"))]
        cuts |= {name: _even("rows", model.config.vocab, gpus, 1) for name in vocabulary}
        self.config: ModelConfig = divided
        for name, cut in cuts.items():
            source = self.tensors[name]
            for rank in range(gpus):
                self.tensors[named(name, rank)] = cut.of(source, rank)
        self.joins = frozenset(vocabulary)
        self.sums = frozenset(name for name, cut in cuts.items() if cut.axis == "columns" and name.endswith(".weight"))

    path = property(lambda self: self.whole.path)
    metadata = property(lambda self: self.whole.metadata)
    files = property(lambda self: self.whole.files)
    vision = property(lambda self: self.whole.vision)
    features = property(lambda self: self.whole.features)

    def check_unchanged(self) -> None:
        self.whole.check_unchanged()


def _alias(tensor: Tensor, name: str) -> Tensor:
    return tensor.part(name, 0, tensor.shape)


def _divided(config: ModelConfig, tensors: Mapping[str, Tensor], gpus: int) -> tuple[ModelConfig, Cuts]:
    found: dict[int, dict[str, tuple[Any, Cuts]]] = {}
    for i, layer in enumerate(config.layers):
        own = {name.removeprefix(f"blk.{i}."): of for name, of in tensors.items() if name.startswith(f"blk.{i}.")}
        found[i] = {}
        for part in ("mixer", "beside", "feed_forward", "experts"):
            value = getattr(layer, part)
            if (divide := _DIVIDED.get(type(value))) and (made := divide(value, own, gpus)):
                found[i][part] = made
    sources = {i: layer.attention.kv_layer for i, layer in enumerate(config.layers) if layer.attention}
    for source in {of for of in sources.values() if of is not None}:  # divide all layers that use a cache, or none
        users = [source, *(i for i, of in sources.items() if of == source)]
        if not all("mixer" in found[i] for i in users):
            for i in users:
                found[i].pop("mixer", None)
    layers: list[LayerConfig] = []
    cuts: Cuts = {}
    for i, layer in enumerate(config.layers):
        layers.append(replace(layer, **{part: made for part, (made, _) in found[i].items()}))
        for _, of in found[i].values():
            cuts |= {f"blk.{i}.{name}": cut for name, cut in of.items() if f"blk.{i}.{name}" in tensors}
    return replace(config, layers=tuple(layers)), cuts


def _even(axis: str, size: int, gpus: int, block: int) -> Cut:
    """Equal shares of `size`, which are whole blocks; the last ones are padded with zeros."""
    share = _share(size, gpus, block)
    starts = [min(rank * share, size) for rank in range(gpus)]
    return Cut(axis, [[(start, min(share, size - start))] for start in starts], share)


def _share(size: int, gpus: int, block: int) -> int:
    unit = math.lcm(block, BLOCK)
    return -(-size // (gpus * unit)) * unit


def _heads(axis: str, heads: int, size: int, gpus: int, before: int = 0) -> Cut:
    """Shares of `heads` heads, each of `size` rows or columns, which follow `before` rows or columns. If there are
    fewer heads than GPUs, several GPUs have the same head."""
    each = max(heads // gpus, 1)
    first = [rank * heads // gpus for rank in range(gpus)]
    return Cut(axis, [[(before + one * size, each * size)] for one in first], each * size)


def _joined(*cuts: Cut) -> Cut:
    """Several cuts of one tensor, one after the other."""
    parts = [[one for cut in cuts for one in cut.parts[rank]] for rank in range(len(cuts[0].parts))]
    return Cut(cuts[0].axis, parts, sum(cut.whole for cut in cuts))


def _fits(cut: Cut, tensor: Tensor) -> bool:
    """Whether the ranges of a matrix's columns are whole blocks of its format."""
    unit = math.lcm(FORMATS[tensor.format].block, BLOCK)
    return all(number % unit == 0 for ranges in cut.parts for one in ranges for number in one)


# ---- mixers: (configuration of a GPU's part, cuts), or None if they cannot be divided


def _attention(a: AttentionConfig, own: Mapping[str, Tensor], gpus: int):
    if a.heads % gpus or a.row_norms or (a.kv_heads % gpus and gpus % a.kv_heads):
        return None
    output = _heads("columns", a.heads, a.latent.value if a.latent else a.values, gpus)
    if not _fits(output, own["attn_output.weight"]):
        return None
    heads = a.heads // gpus
    found: Cuts = {"attn_output.weight": output, "attn_output.bias": Cut("none")}
    if a.latent:
        stack = _heads("matrices", a.heads, 1, gpus)
        found |= {f"attn_{name}.weight": stack for name in ("q_nope", "q_rope", "k_b", "v_b")}
        found["attn_sinks.weight"] = _heads("rows", a.heads, 1, gpus)
        found["attn_gate.weight"] = _heads("rows", a.heads, 1 if a.head_gate else a.latent.value, gpus)
        return replace(a, heads=heads), found
    if (i := a.indexer) and i.by_head:
        if a.kv_heads % gpus:
            return None
        found["indexer.q_proj.weight"] = _heads("rows", i.heads, i.dim, gpus)
        a = replace(a, indexer=replace(i, heads=i.heads // gpus))
    q, k = (_heads("rows", count, a.head_dim, gpus) for count in (a.heads, a.kv_heads))
    for which, cut in (("q", q), ("q_gate", q), ("k", k), ("v", _heads("rows", a.kv_heads, a.values, gpus))):
        found |= {f"attn_{which}.weight": cut, f"attn_{which}.bias": cut}
    one = _heads("rows", a.heads, 1, gpus)
    found |= dict.fromkeys(("attn_sinks.weight", "attn_slopes"), one)
    if a.each_norm or a.head_factors:
        own_norms = zip("qk", (a.heads, a.kv_heads), strict=True)
        found |= {f"attn_{which}_norm.weight": _heads("rows", count, 1, gpus) for which, count in own_norms}
    gate = one if a.head_gate else _heads("rows", a.heads, a.values, gpus)
    found |= {"attn_gate.weight": gate, "attn_gate.bias": gate}
    return replace(a, heads=heads, kv_heads=max(a.kv_heads // gpus, 1)), found


def _delta_net(d: DeltaNetConfig, own: Mapping[str, Tensor], gpus: int):
    if d.key_heads % gpus:
        return None
    each, size = d.value_heads // d.key_heads, d.head_dim

    def values(axis: str, size: int, before: int = 0) -> Cut:
        if d.grouped:
            return _heads(axis, d.value_heads, size, gpus, before)
        starts = range(before, before + d.value_heads * size, d.key_heads * size)
        return _joined(*(_heads(axis, d.key_heads, size, gpus, start) for start in starts))

    output = values("columns", size)
    if not _fits(output, own["ssm_out.weight"]):
        return None
    q, k = (_heads("rows", d.key_heads, size, gpus, before) for before in (0, d.keys))
    channels, one = _joined(q, k, values("rows", size, 2 * d.keys)), values("rows", 1)
    found = {"attn_qkv.weight": channels, "ssm_conv1d.weight": channels, "attn_gate.weight": values("rows", size)}
    found |= dict.fromkeys(("ssm_beta.weight", "ssm_alpha.weight", "ssm_dt.bias", "ssm_a"), one)
    heads = d.key_heads // gpus
    return replace(d, key_heads=heads, value_heads=heads * each), found | {"ssm_out.weight": output}


def _channel_delta(d: ChannelDeltaConfig, own: Mapping[str, Tensor], gpus: int):
    output = _heads("columns", d.heads, d.head_dim, gpus)
    if d.heads % gpus or not _fits(output, own["attn_output.weight"]):
        return None
    rows, one = _heads("rows", d.heads, d.head_dim, gpus), _heads("rows", d.heads, 1, gpus)
    names = [f"{name}_{which}.weight" for name in ("attn", "ssm_conv1d") for which in "qkv"]
    found = dict.fromkeys([*names, f"{d.decays[-1]}.weight", f"{d.gates[-1]}.weight", "ssm_dt.bias"], rows)
    found |= {"ssm_beta.weight": one, "ssm_a": one, "attn_output.weight": output}
    return replace(d, heads=d.heads // gpus), found


def _mamba2(s: Mamba2Config, own: Mapping[str, Tensor], gpus: int):
    output = _heads("columns", s.heads, s.head_dim, gpus)
    if s.heads % gpus or s.groups % gpus or not _fits(output, own["ssm_out.weight"]):
        return None
    inner, one = _heads("rows", s.heads, s.head_dim, gpus), _heads("rows", s.heads, 1, gpus)
    b, c = (_heads("rows", s.groups, s.state, gpus, s.inner + i * s.groups * s.state) for i in range(2))
    found = {"ssm_in_z.weight": inner, "ssm_norm.weight": _heads("rows", s.groups, 1, gpus), "ssm_out.weight": output}
    found |= dict.fromkeys(("ssm_in_x.weight", "ssm_conv1d.weight", "ssm_conv1d.bias"), _joined(inner, b, c))
    found |= dict.fromkeys(("ssm_in_dt.weight", "ssm_dt.bias", "ssm_a", "ssm_d"), one)
    return replace(s, inner=s.inner // gpus, heads=s.heads // gpus, groups=s.groups // gpus), found


# ---- feed-forward blocks


def _feed_forward(f: FeedForwardConfig, own: Mapping[str, Tensor], gpus: int):
    return _block(f, own, gpus, "ffn_{}.{}")


def _block(f: FeedForwardConfig | SharedExpertConfig | ExpertsConfig, own: Mapping[str, Tensor], gpus: int, name: str):
    down = own[name.format("down", "weight")]
    size, block = down.shape[-1], FORMATS[down.format].block
    rows, columns = (_even(axis, size, gpus, block) for axis in ("rows", "columns"))
    # The biases of a stack of matrices are a matrix, in which a matrix's rows are columns.
    of_rows = columns if isinstance(f, ExpertsConfig) else rows
    found = {name.format("down", "weight"): columns, name.format("down", "bias"): Cut("none")}
    for which in ("gate", "up"):
        found |= {name.format(which, "weight"): rows, name.format(which, "bias"): of_rows}
    return replace(f, size=rows.whole), found


def _experts(e: ExpertsConfig, own: Mapping[str, Tensor], gpus: int):
    made, found = _block(e, own, gpus, "ffn_{}_exps.{}")
    if e.shared:
        shared, more = _block(e.shared, own, gpus, f"ffn_{{}}{e.shared.suffix}.{{}}")
        made, found = replace(made, shared=shared), found | more
    return made, found


_DIVIDED: dict[type, Callable[[Any, Mapping[str, Tensor], int], tuple[Any, Cuts] | None]] = {
    AttentionConfig: _attention,
    DeltaNetConfig: _delta_net,
    ChannelDeltaConfig: _channel_delta,
    Mamba2Config: _mamba2,
    FeedForwardConfig: _feed_forward,
    ExpertsConfig: _experts,
}
