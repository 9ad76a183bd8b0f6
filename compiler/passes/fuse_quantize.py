"""quantize(f(x)) becomes f with a quantized output, for the producers that can; attention and gates can if their heads
are whole blocks."""

from mlc_amd.compiler import ops
from mlc_amd.compiler.passes.rewrite import rewrite

PRODUCERS = ("rms_norm", "layer_norm", "attention", "gate", "gate_up", "gather", "expert_gate_up")
BLOCKS = ("tiles", "rows")  # layouts of int8 blocks
BLOCK = 32  # columns


def fuse_quantize(mod):
    def rule(call, producer):
        if ops.name_of(call) != "quantize":
            return None
        value = producer(call.args[1])
        if ops.name_of(value) not in PRODUCERS:
            return None
        layout = str(call.attrs["layout"])
        if ops.name_of(value) == "gate" and int(value.attrs["normed"]) and int(value.attrs["size"]) % BLOCK:
            return None
        if ops.name_of(value) == "attention" and layout.startswith(BLOCKS) and ops.value_columns(value) % BLOCK:
            return None
        return ops.with_attrs(value, layout=layout)

    return rewrite(mod, rule)
