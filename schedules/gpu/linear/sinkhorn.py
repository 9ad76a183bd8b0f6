"""The kernel for matrices that mix residual streams (schedules/operators/streams.py). A thread has one matrix in its
registers."""

import functools

from tvm.tirx.script import builder as T

from mlc_amd.schedules.gpu.base.device import exp2, launch, maximum, rcp
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.registers import local, put
from mlc_amd.schedules.gpu.base.step import builds, is_live
from mlc_amd.schedules.operators.attention import LOG2E
from mlc_amd.schedules.operators.streams import Sinkhorn
from mlc_amd.schedules.tir import Buffer, declared


@builds(Sinkhorn)
def sinkhorn(op: Sinkhorn, arch: Device, state: Buffer, plan: None) -> None:
    """Kernel (state, X, Y)."""
    n, m = op.count, op.m
    X, Y = declared(X=(m, n * n), Y=(m, n * n))
    rows = [[j * n + i for i in range(n)] for j in range(n)]
    columns = [[j * n + i for j in range(n)] for i in range(n)]
    with launch((-(-m // arch.wave),), (arch.wave,)) as (group, lane):
        row = T.Bind(group * arch.wave + lane)
        with T.If((row < m) & is_live(state, row)), T.Then():
            own = local(n * n)

            def divide(places: list[int]) -> None:
                inverse = T.Bind(rcp(sum((own[i] for i in places), T.float32(op.eps))))
                for i in places:
                    put(own, own[i] * inverse, i)

            for places in rows:
                x = [T.Bind(X[row, i]) for i in places]
                top = T.Bind(functools.reduce(maximum, x))
                weights = [T.Bind(exp2((one - top) * T.float32(LOG2E))) for one in x]
                inverse = T.Bind(rcp(sum(weights[1:], weights[0])))
                for i, weight in zip(places, weights, strict=True):
                    put(own, weight * inverse + T.float32(op.eps), i)
            for places in columns:
                divide(places)
            with T.serial(op.iterations - 1):
                for places in (*rows, *columns):
                    divide(places)
            for i in range(n * n):
                put(Y, own[i], row, i)
