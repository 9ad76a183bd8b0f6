"""The common part of all kernels of a step: their declaration and registration, simple plans, and the parameter
`state`, which describes the rows of a step.

A step computes up to m rows of activations. `state` int32[4] = {single, live, image, 0} is the first parameter of
every kernel. Kernels read it at run time, so that the same recorded launches serve every step. Rows 0 .. live-1 are
live: they hold tokens. Of these, rows 0 .. single-1 are single rows: each is the newest token of a sequence, or a guess
after it. Rows single .. live-1 are a chunk: consecutive tokens of one sequence, of which the first `image` are rows of
an image. The positions and sequences of rows are described in attention/cache.py.

A norm may select rows (`norm.py`). For the kernels after it, `state` is {n, n, 0, 0}, where n is the number of these
rows.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from mlc_amd.schedules.gpu import registry
from mlc_amd.schedules.gpu.base.device import COHERENT
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.operators import Embed, Operator, Quantize
from mlc_amd.schedules.space import Kernel, Space, planned
from mlc_amd.schedules.tir import Buffer, Expr, Frame

# Steps of up to FEW rows use GEMVs, which load each weight once and multiply it with every row. For more rows
# arithmetic takes longer than the loads of weights, and GEMMs are faster. A power of two.
FEW = 8
# Annotations of loops.
KEPT = "mlc_amd.kept"  # drivers must not unroll the loop
ONCE = "mlc_amd.once"  # the loop has at most one step: the SPIR-V generator makes it an `if`


Builder = Callable[..., tirx.PrimFunc]  # called with (operator, arch, name, plan or None)


@contextmanager
def kernel(name: str) -> Iterator[Any]:
    """`with kernel(name) as ir:` begins a kernel, whose code is emitted in the block. Afterwards `ir.get()` is its
    PrimFunc. Its parameters must not alias."""
    with IRBuilder() as ir, T.prim_func(s_tir=True):
        T.func_name(name)
        T.func_attr({"tirx.noalias": True, "global_symbol": name})
        yield ir


def builder(emit: Callable[..., None]) -> Builder:
    """Makes a builder of `emit(operator, arch, state, plan)`, which declares a kernel's parameters after `state`, and
    emits its code."""

    @functools.wraps(emit)
    def build(op: Operator, arch: Device, name: str, plan: Any = None) -> tirx.PrimFunc:
        with kernel(name) as ir:
            emit(op, arch, T.arg("state", T.buffer((4,), "int32")), plan)
        return ir.get()

    return build


def builds(*operators: type[Operator]) -> Callable[[Callable[..., None]], Builder]:
    """A decorator for such an `emit`: makes its `builder`, and registers it for these operators."""
    return lambda emit: registry.builds(*operators)(builder(emit))


def exchanges(*names: str) -> None:
    """Declares that workgroups of a launch exchange data through the parameters of these names (COHERENT)."""
    T.func_attr({COHERENT: list(names)})


def kept(count: Expr) -> Frame:
    """`with kept(n) as i:` is a loop that drivers do not unroll."""
    return T.serial(count, annotations={KEPT: 1})


def once(condition: Expr) -> Frame:
    """`with once(condition):` is a loop of 0 or 1 steps. It replaces an `if`, in which TVM does not allow barriers."""
    return T.serial(T.Bind(T.cast(condition, "int32")))


def where(condition: Expr) -> Frame:
    """`once`, but the SPIR-V generator makes it an `if`: for a loop, drivers would keep values in registers for a next
    step."""
    return T.serial(T.Bind(T.cast(condition, "int32")), annotations={ONCE: 1})


def is_live(state: Buffer, row: Expr) -> Expr:
    """Whether a row of the step is live: whether it holds a token."""
    return row < state[1]


def live_rows(state: Buffer, m: int, minimum: int = 1) -> Expr:
    """The number of live rows of a step of m rows, limited to `minimum` .. m. minimum: 0 or 1. If it is 1 and m is 1,
    the state is not read."""
    if minimum == 0:
        return T.min(state[1], T.int32(m))
    return T.int32(1) if m == 1 else T.Bind(T.max(T.min(state[1], T.int32(m)), T.int32(1)))


def if_live(state: Buffer, m: int | None, row: Expr) -> Frame:
    """`with if_live(..):` contains code for live rows only. It is a loop of 0 or 1 steps, because TVM does not allow
    barriers in an `if`. row: of the m rows of the launch, of which at least one is live. m: None if it is not known."""
    if m == 1:
        return T.serial(1)
    return T.serial(T.Select(row < T.Bind(T.max(state[1], T.int32(1))), T.int32(1), T.int32(0)))


@contextmanager
def when(condition: Expr | None) -> Iterator[None]:
    """`with when(condition):` is an `if`; without any condition if it is None."""
    if condition is None:
        yield
    else:
        with T.If(condition), T.Then():
            yield


def opaque_zero(state: Buffer, i: Expr) -> Expr:
    """An int32 that is always 0, but that the compiler must compute again in each iteration i of a loop. A load whose
    index contains it stays inside the loop."""
    return T.Bind(state[3] & i)


def unknown_zero(state: Buffer) -> Expr:
    """An int32 that is always 0, which the compiler does not know."""
    return T.Bind(state[3])


def all_of(conditions: Iterable[Expr]) -> Expr | None:
    """The conjunction of conditions, for `when`; None if there are none."""
    found = None
    for condition in conditions:
        found = condition if found is None else found & condition
    return found


# ---- the plan of kernels that choose only how many threads a workgroup has

WAVES = (1, 2, 4, 8)  # numbers of waves of a workgroup to choose from
SUMS = 256  # upper limit of a lane's float32 accumulators; more would leave no registers for other values
THREADS = {"threads": (32, 64, 128, 256, 512, 1024)}


@dataclass(frozen=True)
class ThreadsPlan:
    threads: int  # threads of a workgroup, a multiple of a wave


def checked_threads(arch: Device, threads: int) -> int:
    """Returns `threads`. Raises ValueError if a workgroup cannot have so many threads."""
    if threads > arch.threads or threads % arch.wave:
        raise ValueError(
            f"{arch.name} has workgroups of up to {arch.threads} threads in waves of {arch.wave}, not of {threads}"
        )
    return threads


def threads_of(arch: Device, plan: ThreadsPlan | None = None) -> int:
    """The threads of a workgroup: those of the plan, by default as many as the arch allows. Raises ValueError for an
    invalid number."""
    return checked_threads(arch, plan.threads if plan else arch.threads)


planned_threads = planned(THREADS, lambda op, arch: ThreadsPlan(threads_of(arch)))


def columns_space(width: int) -> Callable[[Embed | Quantize, Device], Space]:
    """The space of plans of a kernel in which each thread has `width` columns of a row."""

    @planned_threads
    def kernel(op: Embed | Quantize, arch: Device, plan: ThreadsPlan) -> Kernel:
        threads = threads_of(arch, plan)
        return Kernel(threads, -(-op.k // (threads * width)) * op.m, threads, width * 4)

    return kernel
