"""The tensors that a graph uses in place of the file's: parts of merged tensors with their biases and scales, tables
that follow from the configuration, and factors of experts.

In: a configuration and the tensors of a file by name. Out: `graph_tensors`.
"""

from collections.abc import Mapping
from functools import partial

import numpy as np

from mlc_amd.compiler.gguf.tensor import Tensor
from mlc_amd.compiler.models.config import ExpertsConfig, ModelConfig
from mlc_amd.compiler.models.recurrent_config import (
    BITS,
    LAGS,
    LIMBS,
    DeltaNetConfig,
    LinearAttentionConfig,
    NgramConfig,
)
from mlc_amd.compiler.models.recurrent_tensors import BLOCK
from mlc_amd.compiler.models.residuals.config import GatedConfig, part_name
from mlc_amd.compiler.models.rope import alibi_slopes
from mlc_amd.compiler.models.tensors import SCALE, Part, factor_names, merged_parts


def graph_tensors(config: ModelConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors for the graph, by name: merged tensors are replaced by their parts, and unused ones are left out."""
    unused = set(config.unused)
    tensors = {name: tensor for name, tensor in tensors.items() if name not in unused}
    made = dict(tensors)
    for part in merged_parts(config):
        source = made.pop(part.source, None) or tensors[part.source]
        made[part.name] = _part(part, source)
        _add_companions(part, source, tensors, made)
    if isinstance(s := config.streams, GatedConfig):
        norm = made.pop("output_hc_norm.weight")
        for i in range(s.count):
            name = f"{part_name(i)}.weight"
            made[name] = Tensor.made(name, (config.hidden,), partial(_row, norm, i))
    for i, layer in enumerate(config.layers):
        if (a := layer.attention) and (of := a.indexer) and of.block > 1 and not of.by_head:
            name = f"blk.{i}.indexer.mean"
            made[name] = Tensor.made(
                name, (of.dim * of.block,), partial(np.full, of.dim * of.block, 1 / of.block, "f4")
            )
        if (a := layer.attention) and a.alibi and not config.encoder:
            name = f"blk.{i}.attn_slopes"
            made[name] = Tensor.made(name, (a.heads,), partial(alibi_slopes, a.heads, a.alibi))
        if isinstance(d := layer.mixer, DeltaNetConfig) and (n := d.ngrams):
            lags, taps = f"blk.{i}.ple_lags", f"blk.{i}.ple_taps"
            made[lags] = Tensor.made(lags, (LAGS * n.size,), partial(_lags, n))
            kernel, name = made.pop(f"blk.{i}.ple_conv1d.weight"), f"blk.{i}.ple_products.weight"
            columns = -(-n.size * LIMBS // BLOCK) * BLOCK
            made[name] = Tensor.made(name, (config.vocab, columns), partial(_products, n, config.vocab, columns))
            made[taps] = Tensor.made(taps, (kernel.shape[0] * n.reach,), partial(_taps, n, kernel))
        if isinstance(a := layer.mixer, LinearAttentionConfig):
            name = f"blk.{i}.attn_decay"
            made[name] = Tensor.made(name, (a.heads,), partial(_decay, a))
        for block in (layer.feed_forward, layer.experts):
            if isinstance(block, ExpertsConfig):
                made |= _factors(f"blk.{i}.", block, made)
    return made


def _decay(a: LinearAttentionConfig) -> np.ndarray:
    """The exponent by which the states of each head decay in a step."""
    return (-a.factor * 2.0 ** (-8.0 / a.heads * np.arange(1, a.heads + 1))).astype(np.float32)


def _row(tensor: Tensor, i: int) -> np.ndarray:
    return tensor.dequantize()[i]


def _lags(n: NgramConfig) -> np.ndarray:
    """The weights of a convolution whose result has in column j the input of j positions before."""
    return np.eye(n.size, dtype=np.float32)[:, ::-1][np.arange(LAGS) % n.size].reshape(-1)


def _products(n: NgramConfig, vocab: int, columns: int) -> np.ndarray:
    """The limbs of the product of each token with each multiplier, the lowest limb first."""
    products = np.arange(vocab, dtype=np.uint64)[:, None] * np.array(n.multipliers, np.uint64)
    limbs = products[:, :, None] >> (np.arange(LIMBS, dtype=np.uint64) * np.uint64(BITS)) & np.uint64((1 << BITS) - 1)
    return np.pad(limbs.reshape(vocab, -1), ((0, 0), (0, columns - n.size * LIMBS))).astype(np.float32)


def _taps(n: NgramConfig, kernel: Tensor) -> np.ndarray:
    """The convolution's weights, with zeros for the positions between."""
    found = np.zeros((kernel.shape[0], n.reach), np.float32)
    found[:, :: n.size] = kernel.dequantize().reshape(-1, n.taps)
    return found.reshape(-1)


def _part(part: Part, source: Tensor) -> Tensor:
    if part.transposed:
        return source.transposed(part.name, part.first, part.shape)
    if part.pieces:
        found = source.pieces(part.name, part.shape, part.groups, part.pieces)
    else:
        found = source.part(part.name, part.first, part.shape)
    return found.filled(part.filled) if part.filled and part.filled != found.shape else found


def _add_companions(part: Part, source: Tensor, tensors: Mapping[str, Tensor], made: dict[str, Tensor]) -> None:
    """Adds the scale and the bias of the source to a part: of the bias, the entries for the part's rows."""
    if not part.name.endswith("weight") or part.transposed:
        return
    own, of = part.name.removesuffix("weight"), part.source.removesuffix("weight")
    if scale := tensors.get(of + SCALE):
        made[own + SCALE] = scale
    if bias := tensors.get(of + "bias"):
        rows = _rows(part, source)
        made.pop(of + "bias", None)
        made[own + "bias"] = Tensor.made(own + "bias", rows.shape, lambda: _entries(bias, rows))


def _entries(bias: Tensor, rows: np.ndarray) -> np.ndarray:
    return np.append(bias.dequantize().reshape(-1), 0.0)[rows]


def _rows(part: Part, source: Tensor) -> np.ndarray:
    """The numbers of the source's rows in the part, for all matrices; -1 for rows of zeros."""
    *stack, count, _ = part.shape
    groups = part.groups or (stack[0] if stack else 1)
    of_each = source.rows // groups
    pieces = part.pieces or ((part.first, count),)
    if part.pieces:  # one piece of all groups after the other
        found = [np.arange(group * of_each + first, group * of_each + first + size)
                 for first, size in pieces for group in range(groups)]  # fmt: skip
    else:
        zeros = (part.filled[-2] if part.filled else count) - count
        found = [np.append(np.arange(count) + group * of_each + part.first, np.full(zeros, -1, np.int64))
                 for group in range(groups)]  # fmt: skip
    return np.concatenate(found)


def _factors(block: str, experts: ExpertsConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Factors of each expert's input and output, which replace the scales of its matrices: act(a G x) * (b U x) = act(G
    a x) * (b / a) (U a x)."""
    scales = {which: tensors.get(f"{block}ffn_{which}_exps.{SCALE}") for which in ("gate", "up", "down")}
    if not any(scales.values()):
        return {}

    def values(which: str) -> np.ndarray:
        tensor = scales[which]
        return np.ones(experts.count, np.float32) if tensor is None else tensor.dequantize().reshape(-1)

    def output() -> np.ndarray:
        inner = values("gate")
        share = np.divide(values("up"), inner, out=np.zeros_like(inner), where=inner != 0)
        return values("down") * (share if experts.gated else 1.0)

    before, after = factor_names(block)
    made = {after: Tensor.made(after, (experts.count,), output)}
    inner = "gate" if experts.gated else "up"
    if scales[inner]:
        made[before] = Tensor.made(before, (experts.count,), lambda: values(inner))
    return made
