"""An RMS norm without a launch of its own: the kernel before it and the kernels after it share the work.

    y = x * G * scale(x), scale(x) = 1 / sqrt(mean(x*x) + eps), so W y = scale(x) * W (x * G)

The kernel that computes x (a linear layer, or an exchange) *prepares* the norm (`PreparedNorm`): it also stores x * G,
in the layout in which the layers after it read their input, and the sums of x*x over each `layouts.SUMMED` columns. The
layers that read the norm *complete* it (`CompletedNorm`): they multiply their products by scale(x), one number for each
token.

    Squares  float32 [m, k / SUMMED]   the sums of x*x
    A, S     layout "rows"             x * G: int8 blocks, which have scales of their own
    H        layout "lanes"            x * G * Scale * MARGIN; values beyond float16 become its largest number
    Scale    float32 [m]               with "lanes": scale(x) of an earlier norm of the same residual stream, because x
                                       may exceed the range of float16
"""

from collections.abc import Callable
from typing import NamedTuple

from tvm.tirx.script import builder as T

from mlc_amd.schedules.gpu.base.device import rcp, wave_sum
from mlc_amd.schedules.gpu.base.norm import row_scale
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.quantize import WIDTH, act_args, emit_store
from mlc_amd.schedules.gpu.base.registers import at, elements, filled, lane_of, put
from mlc_amd.schedules.gpu.base.step import all_of, when
from mlc_amd.schedules.gpu.recurrent.lane_rows import width_of
from mlc_amd.schedules.operators.layouts import SUMMED, kind_of
from mlc_amd.schedules.tir import Buffer, Expr

# Scaled by the earlier norm, x has a root mean square of about 1. With MARGIN, values up to 65504 / MARGIN fit into
# float16, and values down to 1 / 256 keep all its bits.
MARGIN = 2.0**-6

Loaded = tuple[Expr | None, Expr]  # of `PreparedNorm.load`


class PreparedNorm:
    """The norm that a kernel prepares of its result, m rows of n columns, in a layout. Declares its input
    parameters."""

    def __init__(self, m: int, n: int, layout: str):
        self.m, self.n, self.layout, self.summed = m, n, layout, SUMMED[kind_of(layout)]
        self.G = T.arg("NG", T.buffer((n,), "float32"))
        self.scale: Buffer = T.arg("NS", T.buffer((m,), "float32")) if kind_of(layout) == "lanes" else None

    def declare_outputs(self) -> None:
        self.out = act_args(self.m, self.n, self.layout, ["Hn"] if kind_of(self.layout) == "lanes" else ["An", "Sn"])
        self.squares = T.arg("NewSquares", T.buffer((self.m, self.n // self.summed), "float32"))

    def load(self, token: Expr, row: Expr, count: int = WIDTH) -> Loaded:
        """Loads the inputs that `store` needs for `count` rows from `row` on."""
        return None if self.scale is None else T.Bind(self.scale[token]), T.Bind(self.G[at(row, count)])

    def store(
        self, arch: Device, token: Expr, row: Expr, x: Expr, loaded: Loaded, live: Expr | None = None, stride: int = 1
    ) -> None:
        """Stores the prepared norm of some rows of a token. x: the results, float32x4 or float32x8, of rows `row`.. .
        loaded: from `load`. Lanes that are `stride` apart must have the other rows of a sum, and must call this, too.
        live: see `emit_store`."""
        values, (scale, g) = [T.Bind(value) for value in elements(x)], loaded
        scaled = [v * lane_of(g, i) for i, v in enumerate(values)]
        if scale is not None:
            factor = T.Bind(scale * T.float32(MARGIN))
            scaled = [v * factor for v in scaled]
        emit_store(arch, self.layout, self.out, [T.Bind(v) for v in scaled], token, row, live)
        squares = [v * v for v in values]
        total = wave_sum(arch, T.Bind(sum(squares[1:], squares[0])), self.summed // len(values), stride)
        with when(all_of([row % self.summed == 0] + ([] if live is None else [live]))):
            T.buffer_store(self.squares, total, [token, row // self.summed])


class CompletedNorm:
    """The norm that a kernel completes, of its input, m rows of k columns in a layout. Declares its input parameters.
    new_scale: output parameter for the scales of this norm, which the next one needs; exists if `scale` is not None."""

    def __init__(self, eps: float, m: int, k: int, layout: str):
        self.eps, self.m, self.k, self.summed = eps, m, k, SUMMED[kind_of(layout)]
        self.squares = T.arg("Squares", T.buffer((m, k // self.summed), "float32"))
        self.scale: Buffer = T.arg("Scale", T.buffer((m,), "float32")) if kind_of(layout) == "lanes" else None

    def declare_outputs(self) -> None:
        if self.scale is not None:
            self.new_scale = T.arg("NewScale", T.buffer((self.m,), "float32"))


def token_lanes(arch: Device, tokens: int, threads: int) -> int:
    """The number of lanes that compute the factor of a token, a valid width for `wave_sum`. Raises ValueError for fewer
    threads than tokens."""
    if threads < tokens:
        raise ValueError(f"{threads} threads cannot compute factors of {tokens} tokens")
    return min(1 << (threads // tokens).bit_length() - 1, arch.wave)


class Units(NamedTuple):
    """Units of 16 bytes of shared memory. place(wave, i): the index of unit number i of a wave's part."""

    buffer: Buffer  # uint32x4
    place: Callable[[Expr, Expr], Expr]


class RowFactors:
    """The factors scale(x) of the tokens of a workgroup, in shared memory; for a single token in registers. tokens:
    their number, from token0 on. first: whether this workgroup stores the norm's scales. units: existing shared memory
    for the factors, each in the part of the wave that computes it; None for new memory. Raises ValueError for fewer
    threads than tokens."""

    def __init__(
        self, arch: Device, norm: CompletedNorm, tokens: int, token0: Expr, thread: Expr, threads: int,
        first: Expr | None = None, units: Units | None = None,
    ):  # fmt: skip
        self.arch, self.norm, self.tokens, self.token0, self.first = arch, norm, tokens, token0, first
        self.thread, self.threads, self.units = thread, threads, units
        self.lanes = token_lanes(arch, tokens, threads)
        self.total: Buffer = None  # of `begin`
        self.loaded: tuple[Expr, ...] = ()  # `load()`, or nothing yet
        self.own: Expr | None = None  # of a single token, after `compute`
        own = tokens > 1 and units is None
        self.factors: Buffer = T.alloc_buffer((tokens,), "float32", scope="shared") if own else None

    def load(self) -> tuple[Expr, Expr]:
        """Loads the sum of a thread's part, and the scale of the earlier norm. `compute` does this itself, unless the
        caller has set `loaded` to the result, or has called `begin`."""
        norm, lanes, row, part = self.norm, self.lanes, self._row(), self._part()
        sums, total = norm.k // norm.summed, T.float32(0)
        width = width_of(sums)
        for first in range(0, sums, width * lanes):
            place = T.Bind(first + part * width)
            inside = first + width * lanes <= sums
            x = T.Bind(norm.squares[row, at(place if inside else T.min(place, T.int32(sums - width)), width)])
            for value in elements(x):
                total = total + (value if inside else T.Select(place < sums, value, T.float32(0)))
            total = T.Bind(total)  # bound, because code generation would recurse for each of hundreds of terms
        return T.Bind(total), self._before(row)

    def begin(self, columns: int) -> bool:
        """Prepares for adding the sums in the kernel's loop over columns. Returns whether this is possible: then `add`
        must be called in each step. columns: of a step. (Reading all sums before the loop takes as long as some
        steps.)"""
        each, rest = divmod(columns // self.norm.summed, self.lanes)
        if not each or rest or columns % self.norm.summed or self.norm.k % columns:
            return False
        self.each, self.total = each, filled(T.float32(0))
        self.scale = self._before(self._row())
        return True

    def add(self, step: Expr) -> None:
        """Adds the sums of a step's columns; each thread adds a part of them."""
        width = width_of(self.each)
        first = T.Bind((step * self.lanes + self._part()) * self.each)
        total = self.total[0]
        for i in range(0, self.each, width):
            total = sum(elements(T.Bind(self.norm.squares[self._row(), at(first + i, width)])), total)
        put(self.total, total, 0)

    def _before(self, row: Expr) -> Expr:
        """The factor by which the row was multiplied when the norm was prepared."""
        return None if self.norm.scale is None else T.Bind(self.norm.scale[row])

    def _part(self) -> Expr:
        return T.Bind(self.thread % self.lanes)

    def _token(self) -> Expr:
        return T.Bind(self.thread // self.lanes)

    def _row(self) -> Expr:
        return T.Bind(T.min(self.token0 + self._token(), T.int32(self.norm.m - 1)))

    def compute(self) -> None:
        """Computes the factors. All threads must call it. With several tokens, a barrier must follow before `of`."""
        norm, lanes, token, part = self.norm, self.lanes, self._token(), self._part()
        if self.total is not None:
            total, before = T.Bind(self.total[0]), self.scale
        else:  # each segment loads it, in an `if` of its own
            total, before = self.loaded or self.load()
        if lanes > 1:
            total = wave_sum(self.arch, total, lanes)
        scale = row_scale(total, norm.k, norm.eps)
        factor = scale if before is None else scale * rcp(before * T.float32(MARGIN))
        if self.tokens == 1:  # each wave has its sum; each segment computes it, in an `if` of its own
            self.own = T.Bind(factor)
            return
        own = (part == 0) if self.threads <= self.tokens * lanes else (part == 0) & (token < self.tokens)
        with T.If(own), T.Then():
            if self.units is None:
                T.buffer_store(self.factors, factor, [token])
            else:
                put(self.units.buffer, T.reinterpret("uint32x4", T.broadcast(factor, 4)), self._unit(token))
            if norm.scale is not None:
                with T.If(self.first), T.Then():
                    T.buffer_store(norm.new_scale, scale, [self._row()])

    def of(self, token: Expr) -> Expr:
        """The factor of a token of the workgroup, in a register."""
        if self.own is not None:
            return self.own
        if self.units is None:
            return T.Bind(self.factors[token - self.token0])
        return T.Bind(lane_of(T.reinterpret("float32x4", self.units.buffer[self._unit(token - self.token0)]), 0))

    def _unit(self, token: Expr) -> Expr:
        count = self.arch.wave // self.lanes  # of a wave
        return self.units.place(token // count, token % count) if self.units else None

    def scaled(self, token: Expr, x: Expr) -> Expr:
        """x, a float32 or a vector, times the factor of a token of the workgroup."""
        return T.Bind(x * T.broadcast(self.of(token), x.ty.dtype.lanes))


def row_factors(norm: CompletedNorm | None, arch: Device, lane: Expr, wave: Expr, waves: int) -> RowFactors | None:
    """The factors of all rows of a norm that a GEMV completes; None without one. They are loaded after the products,
    whose loads need the registers."""
    if norm is None:
        return None
    return RowFactors(arch, norm, norm.m, T.int32(0), T.Bind(wave * arch.wave + lane), waves * arch.wave)
