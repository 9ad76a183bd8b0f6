"""act(linear(h, gate)) * linear(h, up) becomes one `gate_up`, so that gate and up never reach memory."""

from mlc_amd.compiler import ops
from mlc_amd.compiler.passes.rewrite import rewrite

# Relax operator of an activation: its name in schedules
ACTIVATIONS = {"relax.nn.silu": "silu", "relax.nn.gelu_tanh": "gelu"}


def fuse_gate_up(mod):
    def rule(call, producer):
        if getattr(call.op, "name", "") != "relax.multiply":
            return None
        activated, up = (producer(arg) for arg in call.args)
        act = ACTIVATIONS.get(getattr(getattr(activated, "op", None), "name", ""))
        if act is None:
            return None
        gate = producer(activated.args[0])
        if ops.name_of(gate) != "linear" or ops.name_of(up) != "linear" or not gate.args[1].same_as(up.args[1]):
            return None
        if any(int(x.attrs["biases"][0]) for x in (gate, up)):
            return None
        state, x, gate_weight = gate.args
        return ops.call(
            "gate_up", [state, x, gate_weight, up.args[2]],
            formats=[gate.attrs["formats"][0], up.attrs["formats"][0]], n=gate.attrs["n"][0], k=gate.attrs["k"],
            m=gate.attrs["m"], act=act, layout_in=gate.attrs["layout"], layout="",
        )  # fmt: skip

    return rewrite(mod, rule)
