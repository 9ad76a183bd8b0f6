"""A product and the exchange of its result in one launch: a workgroup sends what it has computed, then waits for what
the others' workgroups of its number computed of the same columns, and adds it up (exchange.py). Of few tokens, whose
products are GEMVs of blocks of 32 rows: a block of a token is a cache line of words.

The kernel does what the product's and the exchange's kernels do. Its parameters are those of the product, those of the
exchange after X, and the boxes.
"""

from dataclasses import replace

from tvm import tirx
from tvm.tirx.script import builder as T

from mlc_amd.schedules.gpu.base.planes import BLOCK
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.step import FEW, kernel
from mlc_amd.schedules.gpu.exchange.exchange import POLLS, Sum, pause_of
from mlc_amd.schedules.gpu.linear import gemv
from mlc_amd.schedules.operators import AllReduce, Linear, Operator


def can_join(product: Operator | None, total: AllReduce, arch: Device) -> bool:
    """Whether there is a kernel that computes a product and the sum of it over all GPUs."""
    if not isinstance(product, Linear) or total.half or total.norm_out not in ("", "rows"):
        return False
    alone = product.plain and not product.norm_out and product.eps is None
    whole = product.segments[0][1] == total.n and total.n % BLOCK == 0
    return alone and whole and product.m <= FEW and gemv.suits(product, arch)


def planned(product: Linear) -> Linear:
    """The operator whose plans are those of a joint kernel: its workgroups have blocks, too."""
    return replace(product, norm_out="rows")


def joint(
    product: Linear, total: AllReduce, capacity: int, arch: Device, name: str, peers: bool = False,
    plan=None, polls: int = POLLS,
) -> tirx.PrimFunc:  # fmt: skip
    """That kernel. capacity, peers, polls: as of `exchange`; plan: of `planned`'s."""
    with kernel(name) as ir:
        state = T.arg("state", T.buffer((4,), "int32"))
        gemv.emit_linear(product, arch, state, plan, lambda: Sum(total, capacity, arch, peers, polls, pause_of(arch)))
    return ir.get()
