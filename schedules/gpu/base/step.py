"""What the kernels of a step share: their declaration, plans, and the buffer `state` that describes the step's rows.

A step computes m rows of activations. `state` int32[4] = {single, live, 0, 0} is the first parameter of every kernel
and read at run time, so that one recorded launch list serves every step. Rows 0 .. live-1 are live. Of these, rows 0 ..
single-1 are single rows: each is the newest token of another sequence. Rows single .. live-1 are a chunk: consecutive
tokens of one sequence. Positions and sequences of rows are `cache.py`'s.

Kernels after a norm that picks rows (`norm.py`) have the parameter, too: there it is {n, n, 0, 0} of these rows.
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

# Rows of a step, at most, in which each weight is loaded once and multiplied with every row (GEMV); a power of two.
# With more rows the products take longer than the weights, and GEMMs take over.
FEW = 8
# annotations of a loop
KEPT = "mlc_amd.kept"  # the driver is told not to unroll it
ONCE = "mlc_amd.once"  # it has at most one step: the SPIR-V generator makes it an `if`


Builder = Callable[..., tirx.PrimFunc]  # (operator, arch, name, plan or None)


@contextmanager
def kernel(name: str) -> Iterator[Any]:
    """`with kernel(name) as ir:` declares and emits a kernel; afterwards `ir.get()` is its PrimFunc. Parameters do not
    alias."""
    with IRBuilder() as ir, T.prim_func(s_tir=True):
        T.func_name(name)
        T.func_attr({"tirx.noalias": True, "global_symbol": name})
        yield ir


def builder(emit: Callable[..., None]) -> Builder:
    """What builds the kernel whose code, and parameters after `state`, emit(operator, arch, state, plan) emits."""

    @functools.wraps(emit)
    def build(op: Operator, arch: Device, name: str, plan: Any = None) -> tirx.PrimFunc:
        with kernel(name) as ir:
            emit(op, arch, T.arg("state", T.buffer((4,), "int32")), plan)
        return ir.get()

    return build


def builds(*operators: type[Operator]) -> Callable[[Callable[..., None]], Builder]:
    """A decorator: the same, registered for these operators."""
    return lambda emit: registry.builds(*operators)(builder(emit))


def exchanges(*names: str) -> None:
    """Workgroups of one launch of the kernel exchange data through the parameters of these names."""
    T.func_attr({COHERENT: list(names)})


def kept(count: Expr) -> Frame:
    """`with kept(n) as i:` a loop that drivers do not unroll."""
    return T.serial(count, annotations={KEPT: 1})


def once(condition: Expr) -> Frame:
    """`with once(condition):` a loop of 0 or 1 steps: TVM refuses barriers in an `if`."""
    return T.serial(T.Bind(T.cast(condition, "int32")))


def where(condition: Expr) -> Frame:
    """As `once`, but the driver gets an `if`: in a loop it keeps in registers what another step would need."""
    return T.serial(T.Bind(T.cast(condition, "int32")), annotations={ONCE: 1})


def is_live(state: Buffer, row: Expr) -> Expr:
    """Whether a row of the step is live: it holds a token whose results count."""
    return row < state[1]


def live_rows(state: Buffer, m: int, minimum: int = 1) -> Expr:
    """The number of live rows of an m-row step, at most m and at least `minimum` (0 or 1). With minimum=1, m == 1 means
    one live row without a look at the state."""
    if minimum == 0:
        return T.min(state[1], T.int32(m))
    return T.int32(1) if m == 1 else T.Bind(T.max(T.min(state[1], T.int32(m)), T.int32(1)))


def if_live(state: Buffer, m: int | None, row: Expr) -> Frame:
    """`with if_live(..):` around what is done for live rows only: a loop of 0 or 1 iterations, since TVM refuses
    barriers in an `if`. row: of the m that the launch has, of which at least one is live; m=None: of any number."""
    if m == 1:
        return T.serial(1)
    return T.serial(T.Select(row < T.Bind(T.max(state[1], T.int32(1))), T.int32(1), T.int32(0)))


@contextmanager
def when(condition: Expr | None) -> Iterator[None]:
    """`with when(condition):` an `if`; nothing where the condition is None."""
    if condition is None:
        yield
    else:
        with T.If(condition), T.Then():
            yield


def opaque_zero(state: Buffer, i: Expr) -> Expr:
    """An int32 that is 0, which the compiler does not know and must compute anew in each iteration i of a loop: an
    index that contains it keeps its load inside the loop."""
    return T.Bind(state[3] & i)


def unknown_zero(state: Buffer) -> Expr:
    """An int32 that is 0, which the compiler does not know."""
    return T.Bind(state[3])


def all_of(conditions: Iterable[Expr]) -> Expr | None:
    """All of these conditions, for `when`; None: there are none."""
    found = None
    for condition in conditions:
        found = condition if found is None else found & condition
    return found


# ---- the plan of kernels that choose only how many threads a workgroup has

WAVES = (1, 2, 4, 8)  # choices of the waves of a workgroup
SUMS = 256  # float32 accumulators of a lane, at most: more leave no registers for anything else
THREADS = {"threads": (32, 64, 128, 256, 512, 1024)}


@dataclass(frozen=True)
class ThreadsPlan:
    threads: int  # of a workgroup; whole waves


def checked_threads(arch: Device, threads: int) -> int:
    """The number itself. ValueError for what a workgroup cannot have."""
    if threads > arch.threads or threads % arch.wave:
        raise ValueError(
            f"{arch.name} has workgroups of up to {arch.threads} threads in waves of {arch.wave}, not of {threads}"
        )
    return threads


def threads_of(arch: Device, plan: ThreadsPlan | None = None) -> int:
    """Threads of a workgroup: the plan's, by default as many as the arch allows. ValueError as of `checked_threads`."""
    return checked_threads(arch, plan.threads if plan else arch.threads)


planned_threads = planned(THREADS, lambda op, arch: ThreadsPlan(threads_of(arch)))


def columns_space(width: int) -> Callable[[Embed | Quantize, Device], Space]:
    """The plans of a kernel in which a thread has `width` of the columns of a row."""

    @planned_threads
    def kernel(op: Embed | Quantize, arch: Device, plan: ThreadsPlan) -> Kernel:
        threads = threads_of(arch, plan)
        return Kernel(threads, -(-op.k // (threads * width)) * op.m, threads, width * 4)

    return kernel
