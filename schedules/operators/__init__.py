"""The operators of models: what each one takes, returns and costs. Each is declared once, as a subclass of `Operator`
(base.py), without TVM."""

from mlc_amd.schedules.operators.attention import CausalAttention, LatentKvWrite, RopeAttention, RopeKvWrite
from mlc_amd.schedules.operators.base import FREE, OPERATORS, VERSION, Operator, Parameter, costs, from_json, parameters
from mlc_amd.schedules.operators.exchange import AllGather, AllReduce
from mlc_amd.schedules.operators.experts import (
    Combine,
    ExpertDown,
    ExpertGateUp,
    ExpertLinear,
    ExpertOrder,
    Gather,
    NormRoute,
    Route,
)
from mlc_amd.schedules.operators.indexer import CompressedAttention, SelectedAttention, SelectKeys
from mlc_amd.schedules.operators.linear import (
    Embed,
    GateUp,
    HeadLinear,
    LayerNorm,
    Linear,
    Norm,
    NormPlace,
    Quantize,
    RmsNorm,
)
from mlc_amd.schedules.operators.packed import Activate, PackedAttention, Pool
from mlc_amd.schedules.operators.recurrent import CausalConv, ChannelDecay, DeltaNet, Gate, SsmScan
from mlc_amd.schedules.operators.sampling import Sample
from mlc_amd.schedules.operators.streams import Sinkhorn

__all__ = [
    "FREE",
    "OPERATORS",
    "VERSION",
    "Activate",
    "AllGather",
    "AllReduce",
    "CausalAttention",
    "CausalConv",
    "ChannelDecay",
    "Combine",
    "CompressedAttention",
    "DeltaNet",
    "Embed",
    "ExpertDown",
    "ExpertGateUp",
    "ExpertLinear",
    "ExpertOrder",
    "Gate",
    "GateUp",
    "Gather",
    "HeadLinear",
    "LatentKvWrite",
    "LayerNorm",
    "Linear",
    "Norm",
    "NormPlace",
    "NormRoute",
    "Operator",
    "PackedAttention",
    "Parameter",
    "Pool",
    "Quantize",
    "RmsNorm",
    "RopeAttention",
    "RopeKvWrite",
    "Route",
    "Sample",
    "SelectKeys",
    "SelectedAttention",
    "Sinkhorn",
    "SsmScan",
    "costs",
    "from_json",
    "parameters",
]
