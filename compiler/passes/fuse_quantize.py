"""quantize(f(x)) becomes f with a quantized output, for the producers that can; attention and gates can if their heads
are whole blocks."""

from dataclasses import replace

from mlc_amd.compiler import ops
from mlc_amd.compiler.passes.rewrite import rewrite
from mlc_amd.schedules.operators import CausalAttention, ExpertGateUp, Gate, GateUp, Gather, Norm, Quantize

PRODUCERS = (Norm, CausalAttention, Gate, GateUp, Gather, ExpertGateUp)
BLOCKS = ("tiles", "rows")  # layouts of int8 blocks
BLOCK = 32  # columns


def fuse_quantize(mod):
    def rule(call, producer):
        quantize = ops.operator_of(call)
        if not isinstance(quantize, Quantize):
            return None
        value = producer(call.args[1])
        op = ops.operator_of(value)
        if not isinstance(op, PRODUCERS):
            return None
        if isinstance(op, Gate) and op.eps is not None and op.size % BLOCK:
            return None
        if isinstance(op, CausalAttention) and quantize.layout.startswith(BLOCKS) and op.layer.value_d % BLOCK:
            return None
        return ops.call(replace(op, layout=quantize.layout), value.args)

    return rewrite(mod, rule)
