"""quantize(f(x)) becomes f with a quantized output, for the producers that can."""

from mlc_amd.compiler import ops
from mlc_amd.compiler.passes.rewrite import rewrite

PRODUCERS = ("rms_norm", "layer_norm", "attention", "gate_up", "gather", "expert_gate_up")


def fuse_quantize(mod):
    def rule(call, producer):
        if ops.name_of(call) != "quantize":
            return None
        value = producer(call.args[1])
        if ops.name_of(value) not in PRODUCERS:
            return None
        return ops.with_attrs(value, layout=call.attrs["layout"])

    return rewrite(mod, rule)
