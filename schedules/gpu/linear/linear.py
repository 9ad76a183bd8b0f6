"""Which kernels compute a linear layer, and the first half of a feed-forward layer: GEMVs for few tokens, on matrix
units where the arch has some for them, else GEMMs."""

from types import ModuleType

from tvm import tirx

from mlc_amd.schedules.gpu import registry
from mlc_amd.schedules.gpu.base.planes import BLOCK
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.experts.experts import check_rows
from mlc_amd.schedules.gpu.linear import gate_up_gemm, gemm, gemv, gemv_matrix
from mlc_amd.schedules.operators import ExpertGateUp, GateUp, Linear
from mlc_amd.schedules.space import Space


def _gemv(op: Linear | GateUp | ExpertGateUp, arch: Device) -> ModuleType | None:
    """The module of the GEMV that computes the operator; None: a GEMM does."""
    return next((family for family in (gemv_matrix, gemv) if family.suits(op, arch)), None)


@registry.builds(Linear)
def linear(op: Linear, arch: Device, name: str, plan=None) -> tirx.PrimFunc:
    return (_gemv(op, arch) or gemm).linear(op, arch, name, plan)


@registry.builds(GateUp, ExpertGateUp)
def gate_up(op: GateUp | ExpertGateUp, arch: Device, name: str, plan=None) -> tirx.PrimFunc:
    if isinstance(op, ExpertGateUp):
        check_rows(op.n, BLOCK)
    return (_gemv(op, arch) or gate_up_gemm).gate_up_swiglu(op, arch, name, plan)


@registry.plans(Linear, GateUp, ExpertGateUp)
def plans(op: Linear | GateUp | ExpertGateUp, arch: Device) -> Space:
    family = _gemv(op, arch)
    return family.plans(op, arch) if family else gemm.plans(op, arch)
