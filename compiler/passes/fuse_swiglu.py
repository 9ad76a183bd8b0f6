"""silu(linear(h, gate)) * linear(h, up) becomes one `gate_up_swiglu`, so that gate and up never reach memory."""

from mlc_amd.compiler import ops
from mlc_amd.compiler.passes.rewrite import rewrite


def fuse_swiglu(mod):
    def rule(call, producer):
        if getattr(call.op, "name", "") != "relax.multiply":
            return None
        silu, up = (producer(arg) for arg in call.args)
        if getattr(getattr(silu, "op", None), "name", "") != "relax.nn.silu":
            return None
        gate = producer(silu.args[0])
        if ops.name_of(gate) != "linear" or ops.name_of(up) != "linear" or not gate.args[1].same_as(up.args[1]):
            return None
        if any(int(x.attrs["biases"][0]) for x in (gate, up)):
            return None
        state, x, gate_weight = gate.args
        return ops.call(
            "gate_up_swiglu", [state, x, gate_weight, up.args[2]],
            formats=[gate.attrs["formats"][0], up.attrs["formats"][0]], n=gate.attrs["n"][0], k=gate.attrs["k"],
            m=gate.attrs["m"],
            act_in=gate.attrs["act"], act="",
        )  # fmt: skip

    return rewrite(mod, rule)
