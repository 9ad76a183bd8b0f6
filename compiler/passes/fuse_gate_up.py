"""act(linear(h, gate)) * linear(h, up) becomes one `gate_up`, so that gate and up never reach memory."""

from mlc_amd.compiler import ops
from mlc_amd.compiler.passes.rewrite import rewrite
from mlc_amd.schedules.operators import GateUp, Linear

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
        g, u = ops.operator_of(gate), ops.operator_of(up)
        if not (isinstance(g, Linear) and isinstance(u, Linear) and gate.args[1].same_as(up.args[1])):
            return None
        if g.biases[0] or u.biases[0]:
            return None
        state, x, gate_weight = gate.args
        ((gate_format, n),), ((up_format, _),) = g.segments, u.segments
        fused = GateUp(gate=gate_format, up=up_format, n=n, k=g.k, m=g.m, act=act, layout_in=g.layout, layout="")
        return ops.call(fused, [state, x, gate_weight, up.args[2]])

    return rewrite(mod, rule)
