"""Layouts of activations: how kernels store token vectors for a linear layer, and the kernel that converts to a layout.

    ""       float32 [m, k]
    "pairs"  H float16 [m, k], with columns in the order in which packed arithmetic decodes quantized weights, for
             cooperative matrices (`gemm_coop.py`); values beyond the range of float16 become its largest number
    "lanes:g"  the same values in the order in which lanes load them, g blocks of a token side by side, for
             `gemm_lanes.py` and `gemm_matrix.py`
    "rows"   A int8 [m, KB, 32]    q = rint(x * (127 / amax)), amax = largest |x| of the 32 columns of a block
             S float32 [m, KB, 4]  d = amax / 127, d * sum(q), d * sum(q[:16]), d * sum(q[16:])

KB = k / 32. Weights with a zero point or a minimum for each 32 or 16 columns need the sums of q. They are always
stored, so that one quantization of activations serves weights of all formats.

The order of columns in "pairs". A word of a code plane (layout "rows": `planes.py`) has one byte for each of columns
4*j .. 4*j + 3; in a nibble plane, byte i has the codes of columns 4*j + i and 16 + 4*j + i. Packed arithmetic converts
two fields that are 16 bits apart to two float16 at a time. So, except for shifts, word j decodes to run j, eight
float16 (16 bytes) of the columns

    4*j, 4*j + 2,    16 + 4*j, 16 + 4*j + 2,    4*j + 1, 4*j + 3,    16 + 4*j + 1, 16 + 4*j + 3

The order of columns does not matter for a sum over columns, so activations are stored in the same order: each block of
32 columns of H is the runs 0 to 3.

The layout "lanes:g" orders the same runs so that the lanes of a wave read 128 * g consecutive bytes:

    H float16 [ceil(m / 8), ceil(k / 32 / g), 256 * g]    a unit has eight tokens and a group of g blocks, ordered as
              [run, token, block, column of the run]    4 x 8 x g x 8; tokens and blocks that do not exist are undefined
"""

from collections.abc import Sequence

from tvm.tirx.script import builder as T

from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.formats import HALF_MAX
from mlc_amd.schedules.gpu import registry
from mlc_amd.schedules.gpu.base.device import launch, maximum, minimum, rcp, rint, shuffle_xor, wave_max, wave_sum
from mlc_amd.schedules.gpu.base.hadamard import hadamard
from mlc_amd.schedules.gpu.base.planes import BLOCK
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.registers import at, lane_of, vector
from mlc_amd.schedules.gpu.base.step import ThreadsPlan, builds, columns_space, if_live, threads_of, when
from mlc_amd.schedules.operators import LayerNorm, NormRoute, Quantize, RmsNorm
from mlc_amd.schedules.operators.layouts import activations, kind_of
from mlc_amd.schedules.tir import Buffer, Expr

NAMES = {"": ["X"], "pairs": ["H"], "lanes": ["H"], "rows": ["A", "S"]}  # {kind of layout: names of parameters}
FIELDS = 4  # fields of S for a block
WIDTH = 4  # columns that a lane holds
LANES = BLOCK // WIDTH  # lanes that hold a block
# If amax is below this, 127 / amax could overflow, so the block becomes zeros.
TINY = 1e-30
RUN = 8  # columns of a run
RUNS = BLOCK // RUN  # runs of a block
TOKENS = 8  # tokens of a unit of the layout "lanes"
# RUN_COLUMNS[j][i]: the column, within the block, of element i of run j
RUN_COLUMNS = tuple(tuple(4 * j + 16 * (i // 2 % 2) + 2 * (i % 2) + i // 4 for i in range(RUN)) for j in range(RUNS))


def unit_size(group: int) -> int:
    """The number of float16 elements in a unit of the layout "lanes:group"."""
    return RUNS * TOKENS * group * RUN


RUNS_OF = ("pairs", "lanes")  # kinds of layouts that consist of runs


def _store_runs(out: Buffer, token: Expr, column: Expr, x: Sequence[Expr]) -> None:
    """Stores columns of a token in the layout "pairs" (`out` has two dimensions) or "lanes" (three). column: the first
    one, a multiple of 4. x: float16 registers, a multiple of 4 of them."""
    for first in range(0, len(x), 4):
        start = T.Bind(column + first)
        quad = T.Bind(start % BLOCK // 4)
        if len(out.shape) == 2:
            index, place = [token], start // BLOCK * BLOCK + quad % RUNS * RUN
        else:
            group, block = int(out.shape[2]) // unit_size(1), T.Bind(start // BLOCK)
            lane = T.Bind(token % TOKENS * group + block % group)
            index, place = [token // TOKENS, block // group], (quad % RUNS * (TOKENS * group) + lane) * RUN
        place = T.Bind(place + quad // RUNS * 2)
        for odd in range(2):
            pair = T.Shuffle([x[first + odd], x[first + odd + 2]], [T.int32(0), T.int32(1)])
            T.buffer_store(out, pair, [*index, T.ramp(place + 4 * odd, 1, 2)])


def act_args(m: int, k: int, layout: str, names: Sequence[str] | None = None) -> list[Buffer]:
    """Declares the parameters for activations of m tokens and k columns in a layout. names: instead of those of NAMES.
    Raises UserError if the layout has blocks and k is not a multiple of 32."""
    kind = kind_of(layout)
    if kind in ("rows", *RUNS_OF) and k % BLOCK:
        raise UserError(
            f"activations in blocks need a multiple of {BLOCK} columns, not {k}; use a float weight format for this "
            "layer"
        )
    tensors = activations(m, k, layout)
    return [T.arg(name, T.buffer(*tensor)) for name, tensor in zip(names or NAMES[kind], tensors, strict=True)]


def result_args(m: int, k: int, op: RmsNorm | LayerNorm | NormRoute) -> list[tuple[str, list[Buffer]]]:
    """Declares the result parameters of a norm. Returns (layout, parameters) for each layout in which it stores y."""
    layouts = [op.layout, ""] if op.both else [op.layout]
    return [(layout, act_args(m, k, layout, None if layout else ["Y"])) for layout in layouts]


def load_columns(buf: Buffer, *index: Expr) -> list[Expr]:
    """Loads four consecutive columns, as float32 registers. index: of the first one."""
    x = T.Bind(buf[(*index[:-1], at(index[-1], WIDTH))])
    return [T.Bind(lane_of(x, i)) for i in range(WIDTH)]


def column_threads(k: int, arch: Device) -> int:
    """The number of threads of a workgroup in which each thread has WIDTH of k columns: whole waves, at most as many as
    the columns need."""
    return min(arch.threads, -(-k // (WIDTH * arch.wave)) * arch.wave)


def own_columns(chunk: Expr, thread: Expr, threads: int, k: int) -> tuple[Expr, Expr | None]:
    """(first column, argument `live` of `emit_store`) of a thread. chunk: number of its workgroup among those that
    share the k columns of a row."""
    column = T.Bind(chunk * (threads * WIDTH) + thread * WIDTH)
    return T.Bind(T.min(column, T.int32(k - WIDTH))), None if k % (threads * WIDTH) == 0 else column < k


def clamped(x: Expr) -> Expr:
    """A float32 limited to the range of float16."""
    return minimum(maximum(x, T.float32(-HALF_MAX)), T.float32(HALF_MAX))


def emit_store(
    arch: Device, layout: str, out: list[Buffer], x: list[Expr], token: Expr, column: Expr, live: Expr | None = None
) -> None:
    """Stores a lane's columns of a token in a layout. x: float32 registers, a multiple of 4 of them (with "" and "rows"
    it may be one). column: that of x[0], a multiple of len(x). With "rows", neighbouring lanes must hold a block, and
    all lanes of the wave must call this. live: a condition, the same in all lanes of a block; nothing is stored if it
    is false."""
    words, fields = [], []
    if layout == "rows":
        words, fields = quantize_block(arch, x)
    with when(live):
        if layout == "":
            T.buffer_store(out[0], vector(x), [token, at(column, len(x))])
        elif kind_of(layout) in RUNS_OF:
            _store_runs(out[0], token, column, [T.cast(clamped(v), "float16") for v in x])
        else:
            block = T.Bind(T.shift_right(column, T.int32(5)))
            each = min(len(x), WIDTH)
            for i, word in enumerate(words):
                q = T.reinterpret(f"int8x{each}", word) if each > 1 else T.cast(word, "int8")
                T.buffer_store(out[0], q, [token, block, at((column & (BLOCK - 1)) + i * each, each)])
            with T.If((column & (BLOCK - 1)) == 0), T.Then():
                T.buffer_store(out[1], vector(fields), [token, block, T.ramp(0, 1, FIELDS)])


def quantize_lanes(arch: Device, x: list[Expr], lanes: int) -> tuple[list[Expr], Expr]:
    """Quantizes the columns that `lanes` neighbouring lanes hold to int8. x: a lane's columns, float32 registers.
    Returns (a lane's q as int32 registers, amax): x is about q * amax / 127."""
    top = T.fabs(x[0])
    for v in x[1:]:
        top = maximum(top, T.fabs(v))
    top = wave_max(arch, top, lanes)
    inverse = T.Bind(T.Select(top > T.float32(TINY), T.float32(127) * rcp(top), T.float32(0)))
    return [T.Bind(T.cast(rint(v * inverse), "int32")) for v in x], top


def quantize_block(arch: Device, x: list[Expr]) -> tuple[list[Expr], list[Expr]]:
    """Quantizes a block that neighbouring lanes hold. x: a lane's columns, float32 registers, whose number divides 32.
    Returns (words of the lane's q, the block's fields of S, which are valid in the first lane of the block)."""
    lanes = BLOCK // len(x)
    q, top = quantize_lanes(arch, x, lanes)
    words, total = [], T.int32(0)
    for first in range(0, len(q), WIDTH):
        word = T.int32(0)
        for i, v in enumerate(q[first : first + WIDTH]):
            word, total = word | T.shift_left(v & T.int32(255), T.int32(8 * i)), total + v
        words.append(T.Bind(word))
    # low: the sum over the lanes of this half of the block; high: that of the other half, from the mirrored lane
    low = wave_sum(arch, T.Bind(total), lanes // 2)
    high = shuffle_xor(arch, low, lanes - 1 if lanes < BLOCK else lanes // 2)  # masks for which AMD's GPUs have DPP
    d = T.Bind(top * T.float32(1 / 127))
    return words, [d, *(d * T.cast(part, "float32") for part in (low + high, low, high))]


@builds(Quantize)
def quantize(op: Quantize, arch: Device, state: Buffer, plan: ThreadsPlan | None) -> None:
    """Kernel (state int32[4], X float32 [m, k], then A and S, or H, or Y float32 [m, k] for layout ""): converts the
    rows of live tokens to the layout, with op.rotation after multiplication by Hadamard matrices. Raises UserError
    for a layout other than "" unless k is a multiple of 32, ValueError if there is nothing to convert."""
    k, m, layout = op.k, op.m, op.layout
    if not (layout or op.rotation) or kind_of(layout) not in NAMES:
        raise ValueError(f"nothing to convert to the layout {layout!r}")
    threads = threads_of(arch, plan)
    X = T.arg("X", T.buffer((m, k), "float32"))
    out = act_args(m, k, layout, None if layout else ["Y"])
    # Parts of WIDTH columns of a lane, so that a wave has at least as many columns as a Hadamard matrix.
    parts = max(op.rotation // (arch.wave * WIDTH), 1)
    width = threads * WIDTH * parts
    with launch((-(-k // width), m), (threads,)) as (chunk, token, thread), if_live(state, m, token):
        lane = thread & (arch.wave - 1)
        first = T.Bind(chunk * width + (thread - lane) * (WIDTH * parts) + lane * WIDTH)
        places = [T.Bind(first + i * (arch.wave * WIDTH)) for i in range(parts)]
        inside = [T.Bind(T.min(place, T.int32(k - WIDTH))) for place in places]
        x = [load_columns(X, token, place) for place in inside]
        if op.rotation:
            x = hadamard(arch, lane, x, op.rotation)
        for place, own, values in zip(places, inside, x, strict=True):
            emit_store(arch, layout, out, values, token, own, None if k % width == 0 else place < k)


registry.plans(Quantize)(columns_space(WIDTH))
