"""The kernel of `Sinkhorn` on the CPU (schedules/operators/streams.py)."""

from tvm import tirx
from tvm.tirx.script import builder as T

from mlc_amd.schedules.cpu import registry
from mlc_amd.schedules.cpu.base.arch import Arch
from mlc_amd.schedules.cpu.base.kernel import kernel, row_loop
from mlc_amd.schedules.cpu.base.vector import registers, store
from mlc_amd.schedules.operators.streams import Sinkhorn
from mlc_amd.schedules.tir import Expr, declared


@registry.builds(Sinkhorn)
def sinkhorn(op: Sinkhorn, arch: Arch, name: str, plan: None = None) -> tirx.PrimFunc:
    """Kernel (state int32[4], X float32 [m, count * count], Y float32 [m, count * count])."""
    n = op.count
    with kernel(name) as (builder, state):
        X, Y = declared(X=(op.m, n * n), Y=(op.m, n * n))
        with row_loop(state, op.m) as row:
            own, total, top = registers(n * n), registers(1), registers(1)

            def divide(first: Expr, step: int) -> None:
                """Divides n elements, from `first` on at a distance of `step`, by their sum plus eps."""
                store(total, T.float32(op.eps), 0)
                with T.serial(n) as i:
                    store(total, total[0] + own[first + i * step], 0)
                with T.serial(n) as i:
                    store(own, own[first + i * step] / total[0], first + i * step)

            with T.serial(n) as j:
                store(top, X[row, j * n], 0)
                store(total, T.float32(0), 0)
                with T.serial(n) as i:
                    store(top, T.max(top[0], X[row, j * n + i]), 0)
                with T.serial(n) as i:
                    store(own, T.exp(X[row, j * n + i] - top[0]), j * n + i)
                    store(total, total[0] + own[j * n + i], 0)
                with T.serial(n) as i:
                    store(own, own[j * n + i] / total[0] + T.float32(op.eps), j * n + i)
            with T.serial(op.iterations) as step:
                with T.If(step > 0), T.Then(), T.serial(n) as j:
                    divide(j * n, 1)
                with T.serial(n) as i:
                    divide(i, n)
            with T.serial(n * n) as i:
                store(Y, own[i], row, i)
    return builder.get()
