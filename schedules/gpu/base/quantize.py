"""Activations on their way to a linear layer: the layouts in which GPU kernels hand over token vectors, how they are
written, and the kernel that only does that.

    ""       float32 [m, k]
    "half"   H float16 [m, k], for matrix units; what float16 cannot hold becomes its largest number
    "pairs"  the same in the order of columns of `pairs.py`, for cooperative matrices
    "lanes"  the same in the order in which lanes load them (`pairs.py`), for `gemm_lanes.py`
    "rows"   A int8 [m, KB, 32]    q = rint(x * (127 / amax)), amax = largest |x| of the 32 columns of a block
             S float32 [m, KB, 4]  d = amax / 127, d * sum(q), d * sum(q[:16]), d * sum(q[16:])

KB = k / 32. The sums serve weights with a zero point or a minimum per 32 or 16 columns: one quantization serves weights
of all formats.
"""

from collections.abc import Sequence

from tvm import tirx
from tvm.tirx.script import builder as T

from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.gpu import registry
from mlc_amd.schedules.gpu.base.device import launch, maximum, minimum, rcp, rint, shuffle_xor, wave_max, wave_sum
from mlc_amd.schedules.gpu.base.pairs import store_lanes, store_pairs
from mlc_amd.schedules.gpu.base.planes import BLOCK
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.registers import lane_of, vector
from mlc_amd.schedules.gpu.base.step import if_live, kernel, state_arg, when
from mlc_amd.schedules.gpu.base.threads import ThreadsPlan, columns_space, threads_of
from mlc_amd.schedules.operators import Quantize
from mlc_amd.schedules.operators.layouts import activations
from mlc_amd.schedules.space import Space
from mlc_amd.schedules.tir import Buffer, Expr

NAMES = {"": ["X"], "half": ["H"], "pairs": ["H"], "lanes": ["H"], "rows": ["A", "S"]}  # of parameters in each layout
FIELDS = 4  # of S
RUNS_OF = {"pairs": store_pairs, "lanes": store_lanes}  # layouts of runs: what writes columns of a token
WIDTH = 4  # columns that a lane holds
LANES = BLOCK // WIDTH  # that hold a block
# Below this the quotient 127 / amax could overflow: such a block becomes zeros.
TINY = 1e-30
HALF_MAX = 65504.0


def act_args(m: int, k: int, layout: str, names: Sequence[str] | None = None) -> list[Buffer]:
    """Declares the parameters of m tokens of k columns in that layout. names: instead of those of NAMES. UserError when
    its blocks cannot hold k columns."""
    if layout in ("rows", *RUNS_OF) and k % BLOCK:
        raise UserError(
            f"activations in blocks need a multiple of {BLOCK} columns, not {k}; use a float weight format for this "
            "layer"
        )
    tensors = activations(m, k, layout)
    return [T.arg(name, T.buffer(*tensor)) for name, tensor in zip(names or NAMES[layout], tensors, strict=True)]


def columns(base: Expr) -> Expr:
    """The index vector of a lane's columns."""
    return T.ramp(base, 1, WIDTH)


def load_columns(buf: Buffer, *index: Expr) -> list[Expr]:
    """Four float32 registers of consecutive columns."""
    x = T.Bind(buf[(*index[:-1], columns(index[-1]))])
    return [T.Bind(lane_of(x, i)) for i in range(WIDTH)]


def own_columns(chunk: Expr, thread: Expr, threads: int, k: int) -> tuple[Expr, Expr | None]:
    """(first column, `live` of `emit_store`) of a thread in a workgroup, number `chunk` of those that share out k
    columns."""
    column = T.Bind(chunk * (threads * WIDTH) + thread * WIDTH)
    return T.Bind(T.min(column, T.int32(k - WIDTH))), None if k % (threads * WIDTH) == 0 else column < k


def clamped(x: Expr) -> Expr:
    """A float32 as the nearest that float16 can hold."""
    return minimum(maximum(x, T.float32(-HALF_MAX)), T.float32(HALF_MAX))


def emit_store(
    arch: Device, layout: str, out: list[Buffer], x: list[Expr], token: Expr, column: Expr, live: Expr | None = None
) -> None:
    """Writes a lane's columns of a token in that `layout`.

    x: four float32 registers, columns `column`.. (a multiple of 4). For "rows" eight neighbouring lanes hold a block,
    and all lanes of the wave must call this. live: a condition (the same in all lanes of a block), without which
    nothing is written.
    """
    word, fields = None, []
    if layout == "rows":
        (word,), fields = quantize_block(arch, x)
    with when(live):
        if layout == "":
            T.buffer_store(out[0], vector(x), [token, columns(column)])
        elif layout == "half":
            halves = T.cast(vector([clamped(v) for v in x]), f"float16x{WIDTH}")
            T.buffer_store(out[0], halves, [token, columns(column)])
        elif layout in RUNS_OF:
            RUNS_OF[layout](out[0], token, column, [T.cast(clamped(v), "float16") for v in x])
        else:
            block = T.Bind(T.shift_right(column, T.int32(5)))
            T.buffer_store(out[0], T.reinterpret(f"int8x{WIDTH}", word), [token, block, columns(column & (BLOCK - 1))])
            with T.If((column & (BLOCK - 1)) == 0), T.Then():
                T.buffer_store(out[1], vector(fields), [token, block, T.ramp(0, 1, FIELDS)])


def quantize_block(arch: Device, x: list[Expr]) -> tuple[list[Expr], list[Expr]]:
    """(the words of the lane's q, the block's fields of S; valid in the block's first lane) of the columns that a lane
    holds: float32 registers, a number of them that divides a block. Its other lanes are neighbours."""
    lanes = BLOCK // len(x)
    top = T.fabs(x[0])
    for v in x[1:]:
        top = maximum(top, T.fabs(v))
    top = wave_max(arch, top, lanes)
    inverse = T.Bind(T.Select(top > T.float32(TINY), T.float32(127) * rcp(top), T.float32(0)))
    q = [T.Bind(T.cast(rint(v * inverse), "int32")) for v in x]
    words, total = [], T.int32(0)
    for first in range(0, len(q), WIDTH):
        word = T.int32(0)
        for i, v in enumerate(q[first : first + WIDTH]):
            word, total = word | T.shift_left(v & T.int32(255), T.int32(8 * i)), total + v
        words.append(T.Bind(word))
    # the sum of this lane's half of the block; then the other half's, the mirror image of its lanes away
    low = wave_sum(arch, T.Bind(total), lanes // 2)
    high = shuffle_xor(arch, low, lanes - 1)
    d = T.Bind(top * T.float32(1 / 127))
    return words, [d, *(d * T.cast(part, "float32") for part in (low + high, low, high))]


@registry.builds(Quantize)
def quantize(op: Quantize, arch: Device, name: str, plan: ThreadsPlan | None = None) -> tirx.PrimFunc:
    """Kernel (state int32[4], X float32 [m, k], then A, S or H of [m, k]): the live tokens' rows in the layout "rows",
    "half", "pairs" or "lanes". UserError unless 32 divides k, ValueError for another layout."""
    k, m, layout = op.k, op.m, op.layout
    if not layout or layout not in NAMES:
        raise ValueError(f"nothing to convert to the layout {layout!r}")
    if k % BLOCK:
        raise UserError(
            f"activations need a multiple of {BLOCK} columns, not {k}; use a float weight format for this layer"
        )
    threads = threads_of(arch, plan)
    with kernel(name) as ir:
        state, X = state_arg(), T.arg("X", T.buffer((m, k), "float32"))
        out = act_args(m, k, layout)
        with launch((-(-k // (threads * WIDTH)), m), (threads,)) as (chunk, token, thread), if_live(state, m, token):
            inside, live = own_columns(chunk, thread, threads, k)
            emit_store(arch, layout, out, load_columns(X, token, inside), token, inside, live)
    return ir.get()


@registry.plans(Quantize)
def plans(op: Quantize, arch: Device) -> Space:
    return columns_space(op.k, op.m, WIDTH, arch)
