"""Rows on their way to a mixture of experts and back: `gather` copies them to slots, `combine` adds up a row's slots.

In and out as in schedules/operators/experts.py; a thread has four columns of a slot or row.
"""

from tvm import tirx
from tvm.tirx.script import builder as T

from mlc_amd.schedules.gpu import registry
from mlc_amd.schedules.gpu.base.device import fma, launch
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.quantize import WIDTH, act_args, emit_store, load_columns
from mlc_amd.schedules.gpu.base.step import if_live, kernel, state_arg
from mlc_amd.schedules.gpu.base.threads import ThreadsPlan, threads_of
from mlc_amd.schedules.gpu.experts.experts import flat, weights_arg
from mlc_amd.schedules.operators import Combine, Gather
from mlc_amd.schedules.tir import Buffer, Expr, Frame


def _threads(k: int, arch: Device, plan: ThreadsPlan | None) -> int:
    """Threads of a workgroup: whole waves, by default no more than have columns."""
    return threads_of(arch, plan) if plan else min(arch.threads, -(-k // (WIDTH * arch.wave)) * arch.wave)


@registry.builds(Gather)
def gather(op: Gather, arch: Device, name: str, plan: ThreadsPlan | None = None) -> tirx.PrimFunc:
    """Kernel (state, X float32 [m, k], [Pairs int32 [slots] of sorted ones], [Weights float32 [m, used]], then A, S | H
    | Y of [slots, k], as `layout` says): the row of each slot, times its pair's weight if `weighted`. Slots of
    padding are left as they are: what is computed of them, numbers or not, nobody reads. UserError if blocks cannot
    hold k columns."""
    k, m, experts, layout = op.k, op.m, op.of, op.layout
    slots, threads = experts.slots(m), _threads(k, arch, plan)
    step = threads * WIDTH
    with kernel(name) as ir:
        state_arg()
        X = T.arg("X", T.buffer((m, k), "float32"))
        Pairs = T.arg("Pairs", T.buffer((slots,), "int32")) if experts.tile > 1 else None
        Weights = weights_arg(experts, m) if op.weighted else None
        out = act_args(slots, k, layout, None if layout else ["Y"])
        weights = None if Weights is None else flat(Weights)
        with launch((-(-k // step), slots), (threads,)) as (chunk, slot, thread), _if_used(Pairs, slot):
            pair = slot if Pairs is None else T.Bind(T.max(Pairs[slot], T.int32(0)))
            column = T.Bind(chunk * step + thread * WIDTH)
            inside = T.Bind(T.min(column, T.int32(k - WIDTH)))
            x = load_columns(X, 0 if m == 1 else T.Bind(T.min(pair // experts.used, T.int32(m - 1))), inside)
            if weights is not None:
                x = [T.Bind(v * weights[pair]) for v in x]
            emit_store(arch, layout, out, x, slot, inside, None if k % step == 0 else column < k)
    return ir.get()


def _if_used(pairs: Buffer | None, slot: Expr) -> Frame:
    """`with _if_used(..):` around what is done for slots with a pair: a loop of 0 or 1 steps, since lanes exchange
    values."""
    return T.serial(1 if pairs is None else T.Bind(T.cast(pairs[slot] >= 0, "int32")))


@registry.builds(Combine)
def combine(op: Combine, arch: Device, name: str, plan: ThreadsPlan | None = None) -> tirx.PrimFunc:
    """Kernel (state, X float32 [slots, n], Slots int32 [m, used], [Weights float32 [m, used]], [R float32 [m, n]], Y
    float32 [m, n]): the sum of a live row's slots, times their weights, plus R. n: a multiple of 4."""
    n, m, experts = op.n, op.m, op.of
    slots, threads = experts.slots(m), _threads(n, arch, plan)
    step = threads * WIDTH
    with kernel(name) as ir:
        state = state_arg()
        X = T.arg("X", T.buffer((slots, n), "float32"))
        Slots = T.arg("Slots", T.buffer((m, experts.used), "int32"))
        Weights = weights_arg(experts, m) if op.weighted else None
        R = T.arg("R", T.buffer((m, n), "float32")) if op.residual else None
        Y = T.arg("Y", T.buffer((m, n), "float32"))
        with launch((-(-n // step), m), (threads,)) as (chunk, row, thread), if_live(state, m, row):
            column = T.Bind(chunk * step + thread * WIDTH)
            inside = T.Bind(T.min(column, T.int32(n - WIDTH)))
            total = load_columns(R, row, inside) if R is not None else [T.float32(0)] * WIDTH
            places = [T.Bind(T.max(T.min(Slots[row, j], T.int32(slots - 1)), T.int32(0))) for j in range(experts.used)]
            parts = [load_columns(X, place, inside) for place in places]
            for j, x in enumerate(parts):
                if Weights is not None:
                    weight = T.Bind(Weights[row, j])
                    total = [fma(v, weight, t) for v, t in zip(x, total, strict=True)]
                else:
                    total = [T.Bind(t + v) for v, t in zip(x, total, strict=True)]
            emit_store(arch, "", [Y], total, row, inside, None if n % step == 0 else column < n)
    return ir.get()
