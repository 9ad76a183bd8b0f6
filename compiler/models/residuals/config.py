"""Residual streams that are more than x + block(x): what a block reads of them, and how its result joins them.

`tensors`: (name, shape) of those around a block, of which `name` is what their names begin with: "hc_attn" and "hc_ffn"
within a layer, "output_hc" of the output.
"""

from collections.abc import Iterator
from dataclasses import dataclass

Shape = tuple[int, ...]
ATTENTION, FEED_FORWARD = "attn", "ffn"  # which block of a layer


@dataclass(frozen=True)
class HyperConfig:
    """So many streams X_i side by side, all the embedding at first (hyper connections; Hunyuan 4, DeepSeek V4). From
    m = fn . (RMS norm of all columns, without weights), of which each part has a number of `scale` and its own of
    `base`,

        pre_i = sigmoid(scale_0 m_i + base_i) + eps              h = sum of pre_i X_i, what the block reads
        post_i = magnitude * sigmoid(scale_1 m_i + base_i) + post_eps
        X_i = post_i * block(h) + X_i, or with iterations        + sum over j of C_ji X_j

    C is the softmax over i of the last part (Sinkhorn): columns and rows are divided by their sums by turns, beginning
    and ending with columns, the columns `iterations` times; eps is added to it after the softmax, and to each sum.
    """

    count: int
    eps: float
    magnitude: float
    post_eps: float = 0.0
    iterations: int = 0

    def tensors(self, name: str, hidden: int) -> Iterator[tuple[str, Shape]]:
        head = name == "output_hc"
        rows = self.count * (1 if head else 2 + (self.count if self.iterations else 0))
        yield f"{name}_fn.weight", (rows, self.count * hidden)
        yield f"{name}_base.weight", (rows,)
        yield f"{name}_scale.weight", (1 if head else 3 if self.iterations else 2,)


@dataclass(frozen=True)
class GatedConfig:
    """So many streams X_i side by side, all the embedding at first (Qwen 4 Exp). N_i is the RMS norm of X_i, with
    weights of its own. A block, and the output, reads the mean of N_i * sigmoid(up silu(down N / count)), of which N
    are all columns; then X_i += 2 sigmoid((inject N)_i / count) * block."""

    count: int
    rank: int  # columns between down and up

    def tensors(self, name: str, hidden: int) -> Iterator[tuple[str, Shape]]:
        columns = self.count * hidden
        yield f"{name}_norm.weight", (self.count, hidden)
        yield f"{name}_down.weight", (self.rank, columns)
        yield f"{name}_up.weight", (columns, self.rank)
        if name != "output_hc":
            yield f"{name}_inject.weight", (self.count, columns)


@dataclass(frozen=True)
class CheckpointConfig:
    """Every so many layers the stream is kept and begins anew with the result of attention (Kimi K3). A block, and the
    output, reads the sum of the kept ones and the stream, each times softmax(score . (its RMS norm without weights))
    over all of them."""

    layers: int

    def tensors(self, name: str, hidden: int) -> Iterator[tuple[str, Shape]]:
        yield f"{name.removeprefix('hc_').removesuffix('_hc')}_res_score.weight", (hidden,)


def part_name(i: int) -> str:
    """Of the weights that the output's norm has for stream i (GatedConfig), without ".weight"."""
    return f"output_hc_norm.{i}"


Streams = HyperConfig | GatedConfig | CheckpointConfig
