"""GPU kernels by operator: from a workload's arguments and an arch to a TensorIR kernel.

`BUILDERS[operator](**workload.args, arch=.., name=.., plan=..)`: arch is a GpuArch or a Profile, plan of the kernel's
module or None for the default one. The kernel's parameters are the operator's inputs, tuples flattened, then its
outputs (`schedules/operators.py`).
"""

from mlc_amd.schedules.attention import Attention, Rope, described
from mlc_amd.schedules.gpu.attention import attention
from mlc_amd.schedules.gpu.attention_decode import attention_decode
from mlc_amd.schedules.gpu.embed import embed
from mlc_amd.schedules.gpu.gate_up_gemm import gate_up_swiglu as gate_up_gemm
from mlc_amd.schedules.gpu.gemm import linear as gemm
from mlc_amd.schedules.gpu.gemv import gate_up_swiglu as gate_up_gemv
from mlc_amd.schedules.gpu.gemv import linear as gemv
from mlc_amd.schedules.gpu.norm import quantize, rms_norm
from mlc_amd.schedules.gpu.rope_kv_write import rope_kv_write


def _embed(fmt, vocab, k, m, arch, name, plan, scale=1.0):
    return embed(fmt, vocab, k, m, arch, name, plan, scale)


def _rms_norm(k, m, eps, act, row, arch, name, plan):
    return rms_norm(k, m, eps, act, row, arch, name, plan)


def _quantize(k, m, act, arch, name, plan):
    return quantize(k, m, act, arch, name, plan)


def _linear(segments, k, m, act, biases, residual, arch, name, plan):
    return (gemv if m == 1 else gemm)(segments, k, m, act, biases, residual, arch, name, plan)


def _gate_up(gate, up, n, k, m, act_in, act_out, arch, name, plan, act_fn="silu"):
    build = gate_up_gemv if m == 1 else gate_up_gemm
    return build(gate, up, n, k, m, act_in, act_out, arch, name, plan, act_fn)


def _rope_kv_write(m, arch, name, plan, **layer):
    return rope_kv_write(described(Attention, layer), m, described(Rope, layer), arch, name, plan)


def _attention(m, act, arch, name, plan, **layer):
    return attention(described(Attention, layer), m, act, arch, name, plan)


def _rope_attention(act, arch, name, plan, **layer):
    return attention_decode(described(Attention, layer), act, arch, name, described(Rope, layer), plan)


BUILDERS = {
    "embed": _embed,
    "rms_norm": _rms_norm,
    "quantize": _quantize,
    "linear": _linear,
    "gate_up": _gate_up,
    "rope_kv_write": _rope_kv_write,
    "attention": _attention,
    "rope_attention": _rope_attention,
}
