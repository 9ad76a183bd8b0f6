"""The softmax of attention on GPUs: what its kernels share.

Scores are exponents of two: log2(e) is part of the scale of the queries. A kernel keeps, for each row (one query of one
head), the maximum score so far, the sum of weights relative to it, and the weighted sum of values. Weights are scaled
by 2**P_SHIFT: as float16, those down to 2**-29 of the largest are normal numbers. (Cooperative matrices have a scale of
their own, see `attention_prefill_coop.py`.)
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

from tvm.tirx.script import builder as T

from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.gpu.base.device import exp2, maximum, minimum, rcp
from mlc_amd.schedules.gpu.base.planes import BLOCK
from mlc_amd.schedules.gpu.base.quantize import WIDTH, act_args
from mlc_amd.schedules.gpu.base.registers import opaque
from mlc_amd.schedules.operators.attention import LOG2E, Attention
from mlc_amd.schedules.tir import Buffer, Expr

LOWEST = -1e30  # in place of minus infinity: may be subtracted from itself
P_SHIFT = 15  # weights are scaled by 2**15
OTHER_BYTES = 1 << 10  # of shared memory for what is small and of a fixed size
MAX_GROUP = 16  # rows that fit the registers
# On matrices weights are 2**(score - top) with any `top` that keeps them within float16: it is renewed when one would
# exceed 2**LIMIT; the new one makes the largest 2**START. Weights are normal float16 down to 2**-22 of it at least.
LIMIT, START = 15, 8
MAX_EXPONENT = 100  # of a sink's weight: the sum stays finite, and the outputs become 0 to within 2**-85


def group_of(layer: Attention) -> int:
    """Query heads per KV head. UserError unless it is a whole number up to MAX_GROUP."""
    if layer.heads % layer.kv_heads or layer.group > MAX_GROUP:
        raise UserError(
            f"attention on the GPU needs 1 to {MAX_GROUP} query heads per KV head, not {layer.heads} to "
            f"{layer.kv_heads}"
        )
    return layer.group


def soft_cap(attention: Attention, score: Expr) -> Expr:
    """The score with the layer's softcap: softcap * tanh(s / softcap) of s = score / log2(e), times log2(e) again. For
    layers without one, the score itself."""
    cap = attention.softcap
    if not cap:
        return score
    # tanh(x) = 1 - 2 / (exp(2x) + 1): an exponential that overflows gives 1
    inverse = rcp(exp2(score * T.float32(2 / cap)) + T.float32(1))
    return T.Bind(T.float32(cap * LOG2E) - inverse * T.float32(2 * cap * LOG2E))


def with_sink(sinks: Buffer, head: Expr, total: Expr, top: Expr, shift: int = P_SHIFT) -> Expr:
    """The softmax's denominator: `total`, relative to the maximum `top` and scaled by 2**shift, and the weight of the
    head's sink. To be used once per row, when all parts of its keys are joined."""
    if sinks is None:
        return total
    exponent = sinks[head] * T.float32(LOG2E) - top + T.float32(shift)
    return T.Bind(total + exp2(minimum(exponent, T.float32(MAX_EXPONENT))))


def output_args(attention: Attention, m: int, layout: str) -> list:
    """Declares the output [m, heads*value_d] in that `layout`. UserError for int8 blocks if heads are not whole
    blocks."""
    if layout == "rows" and attention.value_d % BLOCK:
        raise UserError(
            f"attention gives int8 blocks of {BLOCK} columns, not of heads of {attention.value_d}; quantize its output "
            "separately"
        )
    return act_args(m, attention.heads * attention.value_d, layout)


Sees = Callable[[int, Expr], Expr]  # whether a row sees a key


class Joined(NamedTuple):
    """Four consecutive columns of a row, from all waves: weights are relative to `top`; out / total is attention's
    output."""

    top: Expr
    total: Expr
    out: list


def join(
    tops: Expr, totals: Expr, waves: int, out: Callable[[Expr, Expr, Expr], list[Expr]]
) -> Callable[[Expr, Expr], Joined]:
    """quad(r, column) -> Joined, for any thread after a barrier; column % 4 == 0. tops, totals: [rows, waves] in LDS;
    out(wave, r, column): a wave's sums of WIDTH columns."""

    def quad(r: Expr, column: Expr) -> Joined:
        top = functools.reduce(maximum, [tops[r, w] for w in range(waves)], T.float32(LOWEST))
        total, sums = T.float32(0), [T.float32(0)] * WIDTH
        for w in range(waves):
            scale = exp2(tops[r, w] - top)
            total = total + totals[r, w] * scale
            sums = [opaque(y + x * scale) for y, x in zip(sums, out(w, r, column), strict=True)]
        return Joined(top, opaque(total), sums)

    return quad
