"""The gate after a mixer: Y = X * sigmoid(Z), or X * silu(Z), where X may be normalized first, head by head.

In: `state`, X and Z float32 [m, k], G float32 [size]: the weights of the RMS norm over each `size` columns. Out: Y
float32 [m, k], or the planes A and S of `quantize.py`. A thread has a row.
"""

from tvm import tirx
from tvm.tirx.script import builder as T

from mlc_amd.schedules.cpu import registry
from mlc_amd.schedules.cpu.base.arch import Arch, tile_rows
from mlc_amd.schedules.cpu.base.kernel import kernel, row_loop
from mlc_amd.schedules.cpu.base.vector import LANES, at, f32, local, registers, splat, store, times_sigmoid, tree_add
from mlc_amd.schedules.cpu.linear.quantize import BLOCK, Output
from mlc_amd.schedules.operators import Gate
from mlc_amd.schedules.tir import Buffer, declared


@registry.builds(Gate)
def gate(op: Gate, arch: Arch, name: str, plan: None = None) -> tirx.PrimFunc:
    """Kernel (state int32[4], X, Z, G if there is an eps, then A, S in tiles if `layout` says so, else Y).
    eps: None: no norm. ValueError unless 32 divides k, and 16 the columns of a head."""
    k, m, size, eps = op.k, op.m, op.size, op.eps
    if k % BLOCK or (eps is not None and size % LANES):
        raise ValueError(f"a gate of {k} columns in heads of {size}: kernels take blocks of {BLOCK} and {LANES}")
    with kernel(name) as (builder, state):
        X, Z, G = declared(X=(m, k), Z=(m, k), G=(size,) if eps is not None else None)
        output = Output(m, k, tile_rows(m, arch), bool(op.layout), "Y")
        with row_loop(state, m) as row:
            scales: Buffer = local(k // size) if eps is not None else None
            if eps is not None:
                with T.serial(k // size) as head:
                    total = registers(LANES)
                    store(total, f32(0.0), at(0))
                    with T.serial(size // LANES) as part:
                        x = T.Bind(X[row, at(head * size + part * LANES)])
                        store(total, total[at(0)] + x * x, at(0))
                    mean = T.Bind(tree_add(T.Bind(total[at(0)]))) * T.float32(1 / size)
                    store(scales, T.float32(1) / T.sqrt(mean + T.float32(eps)), head)
            with T.serial(k // BLOCK) as block:
                values = []
                for half in (0, LANES):
                    column = T.Bind(block * BLOCK + half)
                    x, z = X[row, at(column)], T.Bind(Z[row, at(column)])
                    if eps is not None:
                        x = x * splat(scales[column // size]) * G[at(column % size)]
                    values.append(times_sigmoid(x * z if op.silu else x, z, arch.isa, LANES))
                low, high = values
                output.store_block(low, high, row, block)
    return builder.get()
