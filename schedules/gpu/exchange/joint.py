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
from mlc_amd.schedules.gpu.linear import gemv, gemv_down, norm_place
from mlc_amd.schedules.operators import AllReduce, ExpertDown, Linear, Operator

RESIDENT = 4  # workgroups that a compute unit holds at once: of 256 threads each, whose registers are few


def can_join(product: Operator | None, total: AllReduce, arch: Device) -> bool:
    """Whether there is a kernel that computes a product and the sum of it over all GPUs, and takes no longer than two
    launches: workgroups with whole blocks of rows may be too few for all compute units."""
    if total.half or total.norm_out not in ("", "rows") or total.n % BLOCK:
        return False
    if total.n // BLOCK > RESIDENT * arch.units:
        return False  # a workgroup that waits for one that has no place yet: others may start in another order
    if isinstance(product, ExpertDown):
        split = gemv_down.block_split(product, arch)
        if not product.m == product.tile == 1 or product.residual or split is None:
            return False  # of several rows, workgroups of those that are not live would send nothing
        groups = split.groups, gemv_down.down_split(product, arch).groups
        return not arch.launch_us or norm_place.idle_us(product, groups, arch) <= arch.launch_us
    if not isinstance(product, Linear) or not product.plain or product.norm_out or product.eps is not None:
        return False
    if product.segments[0][1] != total.n or product.m > FEW or not gemv.suits(product, arch):
        return False
    return not arch.launch_us or norm_place.blocks_us(product, "rows", arch) <= arch.launch_us


def planned(product: Linear | ExpertDown) -> Operator:
    """The operator whose plans are those of a joint kernel: that of a linear whose workgroups have blocks, too."""
    return replace(product, norm_out="rows") if isinstance(product, Linear) else product


def joint(
    product: Linear | ExpertDown, total: AllReduce, capacity: int, arch: Device, name: str, peers: bool = False,
    plan=None, polls: int = POLLS,
) -> tirx.PrimFunc:  # fmt: skip
    """That kernel. capacity, peers, polls: as of `exchange`; plan: of `planned`'s, of a linear."""
    with kernel(name) as ir:
        state, rest = T.arg("state", T.buffer((4,), "int32")), (capacity, arch, peers, polls, pause_of(arch))
        emit = gemv.emit_linear if isinstance(product, Linear) else gemv_down.emit_down
        emit(product, arch, state, plan, lambda: Sum(total, *rest))  # type: ignore[arg-type]
    return ir.get()
