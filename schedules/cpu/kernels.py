"""CPU kernels by operator: from a workload's arguments and an arch to a TensorIR kernel.

`BUILDERS[operator](**workload.args, arch=.., name=.., plan=..)`: arch is of `arch.py`, plan of the kernel's module or
None for the default one. The kernel's parameters are the operator's inputs, tuples flattened, then its outputs
(`schedules/operators.py`).
"""

from mlc_amd.schedules.attention import Attention, Rope, described
from mlc_amd.schedules.cpu.attention import attention
from mlc_amd.schedules.cpu.embed import embed
from mlc_amd.schedules.cpu.gate_up import gate_up_swiglu
from mlc_amd.schedules.cpu.linear import linear
from mlc_amd.schedules.cpu.norm import quantize, rms_norm
from mlc_amd.schedules.cpu.rope_kv_write import rope_kv_write


def tile_rows(m: int, arch) -> int:
    """Rows of an activation tile, also of kernels whose activations are not laid out in tiles."""
    return min(m, arch.isa.tokens)


def _embed(fmt, vocab, k, m, arch, name, plan, scale=1.0):
    return embed(fmt, vocab, k, m, name, scale)


def _rms_norm(k, m, eps, act, row, arch, name, plan):
    return rms_norm(k, m, eps, tile_rows(m, arch), bool(act), row, arch.isa, name)


def _quantize(k, m, act, arch, name, plan):
    return quantize(k, m, tile_rows(m, arch), arch.isa, name)


def _linear(segments, k, m, act, biases, residual, arch, name, plan):
    return linear(segments, k, m, tile_rows(m, arch), biases, residual, arch.isa, name, plan)


def _gate_up(gate, up, n, k, m, act_in, act_out, arch, name, plan, act_fn="silu"):
    return gate_up_swiglu(gate, up, n, k, m, tile_rows(m, arch), bool(act_out), arch.isa, name, plan, act_fn)


def _rope_kv_write(m, arch, name, plan, **layer):
    return rope_kv_write(described(Attention, layer), described(Rope, layer), m, arch.isa, name)


def _attention(m, act, arch, name, plan, **layer):
    return attention(described(Attention, layer), m, tile_rows(m, arch), bool(act), arch.isa, name, plan)


BUILDERS = {
    "embed": _embed,
    "rms_norm": _rms_norm,
    "quantize": _quantize,
    "linear": _linear,
    "gate_up": _gate_up,
    "rope_kv_write": _rope_kv_write,
    "attention": _attention,
}
