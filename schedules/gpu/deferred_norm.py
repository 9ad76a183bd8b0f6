"""An RMS norm without a launch: the linear layer before it and those behind it share the work.

    y = x * G * scale(x), scale(x) = 1 / sqrt(mean(x*x) + eps), so W y = scale(x) * W (x * G)

The layer that computes x (`Made`) stores x * G, too, and the sums of x*x of every 16 columns; the layers that read the
norm (`Read`) multiply their products by scale(x), which is one number a token. x * G is stored as float16, and x may be
large: it is multiplied by the scale of an earlier norm of the same residual stream, and MARGIN.

    Scale    float32 [m]           scale(x) of that earlier norm
    H        float16, "lanes"      x * G * Scale * MARGIN; what float16 cannot hold becomes its largest number
    Squares  float32 [m, k / 16]   the sums of x*x of 16 columns
"""

from dataclasses import dataclass
from typing import Any

from tvm.tirx.script import builder as T

from mlc_amd.schedules.gpu.device import rcp, wave_sum
from mlc_amd.schedules.gpu.lane_rows import width_of
from mlc_amd.schedules.gpu.norm import row_scale
from mlc_amd.schedules.gpu.pairs import store_lanes
from mlc_amd.schedules.gpu.quantize import act_args, clamped
from mlc_amd.schedules.gpu.registers import at, lane_of

TILE = 16  # columns whose squares make one sum: rows of a tile of `gemm_few.py`
# x may be 65504 / MARGIN times as large as the x of the earlier norm, which has 1 in the mean of its squares, and
# numbers down to 1 / 256 of that keep all bits of float16.
MARGIN = 2.0**-6


@dataclass(frozen=True)
class Made:
    """What the layer that computes x reads and stores besides."""

    G: Any
    scale: Any
    H: Any
    squares: Any

    def load(self, token, row):
        """What `store` takes besides."""
        return T.Bind(self.scale[token]), T.Bind(self.G[at(row, 4)])

    def store(self, arch, token, row, x, loaded):
        """x: float32x4 of rows `row`.. of a token. The threads that have the other rows of their 16 are neighbours, and
        must call this, too."""
        values = [T.Bind(lane_of(x, i)) for i in range(4)]
        scale, g = loaded
        factor = T.Bind(scale * T.float32(MARGIN))
        halves = [T.cast(clamped(v * lane_of(g, i) * factor), "float16") for i, v in enumerate(values)]
        store_lanes(self.H, token, row, halves)
        total = values[0] * values[0]
        for v in values[1:]:
            total = total + v * v
        total = wave_sum(arch, T.Bind(total), TILE // 4)
        with T.If(row % TILE == 0), T.Then():
            T.buffer_store(self.squares, total, [token, row // TILE])


@dataclass(frozen=True)
class Read:
    """What a layer that reads the norm of m tokens of k columns takes and stores besides. made: the scales of this
    norm, for the next one."""

    eps: float
    m: int
    k: int
    squares: Any
    scale: Any
    made: Any


def declare_made(n, m, inputs) -> Made:
    """inputs: of `declare_made_inputs`; declares the outputs."""
    (H,) = act_args(m, n, "lanes", ["Hn"])
    return Made(*inputs, H, T.arg("NewSquares", T.buffer((m, n // TILE), "float32")))


def declare_made_inputs(n, m) -> tuple:
    return T.arg("NG", T.buffer((n,), "float32")), T.arg("NS", T.buffer((m,), "float32"))


def declare_read_inputs(k, m) -> tuple:
    return T.arg("Squares", T.buffer((m, k // TILE), "float32")), T.arg("Scale", T.buffer((m,), "float32"))


class RowFactors:
    """The factors of a workgroup's tokens, in shared memory.

    tokens: of the workgroup, from token0 on; first: whether this workgroup stores their scales. ValueError for fewer
    threads than tokens.
    """

    def __init__(self, arch, read: Read, tokens, token0, thread, threads, first):
        if threads < tokens:
            raise ValueError(f"{threads} threads cannot compute factors of {tokens} tokens")
        self.arch, self.read, self.tokens, self.token0, self.first = arch, read, tokens, token0, first
        self.thread, self.threads, self.loaded = thread, threads, None
        self.factors = T.alloc_buffer((tokens,), "float32", scope="shared")

    def load(self):
        """Loads what `compute` takes, which does that itself where this was not called before."""
        self.loaded = self._load()

    def _load(self):
        read = self.read
        # of a token: a power of two, which `wave_sum` takes
        lanes = min(1 << (self.threads // self.tokens).bit_length() - 1, self.arch.wave)
        token, part = T.Bind(self.thread // lanes), T.Bind(self.thread % lanes)
        row = T.Bind(T.min(self.token0 + token, T.int32(read.m - 1)))
        sums, total = read.k // TILE, T.float32(0)
        width = width_of(sums)
        for first in range(0, sums, width * lanes):
            place = T.Bind(first + part * width)
            inside = first + width * lanes <= sums
            x = T.Bind(read.squares[row, at(place if inside else T.min(place, T.int32(sums - width)), width)])
            for i in range(width):
                value = lane_of(x, i) if width > 1 else x
                total = total + (value if inside else T.Select(place < sums, value, T.float32(0)))
            total = T.Bind(total)  # a thread may have hundreds: code generation would nest as deep
        return T.Bind(total), T.Bind(read.scale[row]), row, token, part, lanes

    def compute(self):
        """All threads must call this; a barrier must follow before `scaled`."""
        read = self.read
        total, before, row, token, part, lanes = self.loaded or self._load()
        if lanes > 1:
            total = wave_sum(self.arch, total, lanes)
        scale = row_scale(total, read.k, read.eps)
        own = (part == 0) if self.threads <= self.tokens * lanes else (part == 0) & (token < self.tokens)
        with T.If(own), T.Then():
            T.buffer_store(self.factors, scale * rcp(before * T.float32(MARGIN)), [token])
            with T.If(self.first), T.Then():
                T.buffer_store(read.made, scale, [row])

    def scaled(self, token, x):
        """x, float32 or a vector of them, times the factor of a token of the workgroup."""
        factor = T.Bind(self.factors[token - self.token0])
        return T.Bind(x * T.broadcast(factor, x.ty.dtype.lanes))
