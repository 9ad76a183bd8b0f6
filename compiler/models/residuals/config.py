"""Configurations of residual streams that are more than x + block(x): what a block reads of the streams, and how its
result is added to them.

`tensors` returns (name, shape) of the tensors around a block. `name` is the prefix of their names: "hc_attn" and
"hc_ffn" within a layer, "output_hc" for the output.
"""

from collections.abc import Iterator
from dataclasses import dataclass

Shape = tuple[int, ...]
ATTENTION, FEED_FORWARD = "attn", "ffn"  # the blocks of a layer


@dataclass(frozen=True)
class HyperConfig:
    """Hyper connections (Hunyuan 4, DeepSeek V4): `count` streams X_i side by side, which all start as the embedding.

    From m = fn . (RMS norm of all columns, without weights), whose parts (pre, post, mixing) each have one number of
    `scale`, and whose entries each have one of `base`:

        pre_i = sigmoid(scale_0 m_i + base_i) + eps              h = sum of pre_i X_i, the input of the block
        post_i = magnitude * sigmoid(scale_1 m_i + base_i) + post_eps
        X_i = post_i * block(h) + X_i, or with iterations        X_i = post_i * block(h) + sum over j of C_ji X_j

    C is the softmax over i of the last part of m, made doubly stochastic (Sinkhorn): columns and rows are divided by
    their sums in turn, columns first and last, columns `iterations` times. eps is added to C after the softmax, and to
    each sum.
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
    """Gated streams (Qwen 4 Exp): `count` streams X_i side by side, which all start as the embedding. N_i is the RMS
    norm of X_i, with weights of its own; N are all columns of all N_i. A block, and the output, reads the mean over i
    of N_i * sigmoid(up silu(down N / count)). Then X_i += 2 sigmoid((inject N)_i / count) * block."""

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
    """Checkpoints (Kimi K3): every `layers` layers, the stream is stored and starts again with the result of attention.
    A block, and the output, reads the weighted sum of the stored streams and the current one; the weights are the
    softmax, over all of them, of score . (RMS norm of the stream without weights)."""

    layers: int

    def tensors(self, name: str, hidden: int) -> Iterator[tuple[str, Shape]]:
        yield f"{name.removeprefix('hc_').removesuffix('_hc')}_res_score.weight", (hidden,)


def part_name(i: int) -> str:
    """The name, without ".weight", of the weights of the output's norm for stream i (GatedConfig)."""
    return f"output_hc_norm.{i}"


Streams = HyperConfig | GatedConfig | CheckpointConfig
