"""A product and the all-reduce of its result in one kernel. A workgroup computes its part of the product and sends it.
Then it waits for the parts that the workgroups with the same number on the other GPUs have sent, and adds them up
(exchange.py).

This is for few tokens, for which products are GEMVs whose workgroups have blocks of 32 rows: the 32 float16 results of
a block and a token fill one cache line of words.

In: the two operators that the kernel replaces. Out: a kernel with the parameters of the product, then those of the
exchange after X, then the boxes.
"""

from dataclasses import replace

from tvm import tirx
from tvm.tirx.script import builder as T

from mlc_amd.schedules.gpu.base.planes import BLOCK
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.step import FEW, kernel
from mlc_amd.schedules.gpu.exchange.exchange import POLLS, Sum, pause_of
from mlc_amd.schedules.gpu.linear import gemv, gemv_down, norm_place
from mlc_amd.schedules.operators import AllReduce, ExpertDown, Linear, Operator

RESIDENT = 4  # workgroups of 256 threads that a compute unit can hold at the same time; they need few registers


def can_join(product: Operator | None, total: AllReduce, arch: Device) -> bool:
    """Whether there is a joint kernel for a product and its all-reduce that takes no longer than the two separate
    kernels. It may take longer, because workgroups must have whole blocks of rows and so may be too few for all compute
    units."""
    if total.half or total.norm_out not in ("", "rows") or total.n % BLOCK:
        return False
    if total.n // BLOCK > RESIDENT * arch.units:
        return False  # not all workgroups are resident: one could wait for another GPU's that has not started
    if isinstance(product, ExpertDown):
        split = gemv_down.block_split(product, arch)
        if not product.m == product.tile == 1 or product.residual or split is None:
            return False  # with several rows, the workgroups of rows that are not live would send nothing
        groups = split.groups, gemv_down.down_split(product, arch).groups
        return not arch.launch_us or norm_place.idle_us(product, groups, arch) <= arch.launch_us
    if not isinstance(product, Linear) or not product.plain or product.norm_out or product.eps is not None:
        return False
    if product.segments[0][1] != total.n or product.m > FEW or not gemv.suits(product, arch):
        return False
    return not arch.launch_us or norm_place.blocks_us(product, "rows", arch) <= arch.launch_us


def planned(product: Linear | ExpertDown) -> Operator:
    """The operator whose plans a joint kernel uses: for a linear, one that prepares a norm, as its workgroups also have
    blocks of rows."""
    return replace(product, norm_out="rows") if isinstance(product, Linear) else product


def joint(
    product: Linear | ExpertDown, total: AllReduce, capacity: int, arch: Device, name: str, peers: bool = False,
    plan=None, polls: int = POLLS,
) -> tirx.PrimFunc:  # fmt: skip
    """The joint kernel; see the module's docstring. capacity, peers, polls: see `exchange`. plan: of a linear, a plan
    of the operator `planned(product)`."""
    with kernel(name) as ir:
        state, rest = T.arg("state", T.buffer((4,), "int32")), (capacity, arch, peers, polls, pause_of(arch))
        emit = gemv.emit_linear if isinstance(product, Linear) else gemv_down.emit_down
        emit(product, arch, state, plan, lambda: Sum(total, *rest))  # type: ignore[arg-type]
    return ir.get()
