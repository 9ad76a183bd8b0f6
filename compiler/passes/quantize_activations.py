"""Inserts `quantize` before every linear whose weights are multiplied as integers; linears that share an input share its quantization."""

from mlc_amd.compiler import ops
from mlc_amd.compiler.passes.rewrite import rewrite
from mlc_amd.schedules.formats import FORMATS


def quantize_activations(mod, target):
    """`target.act_tile(m)`: tokens side by side in the quantized layout of m tokens; 0 where the target multiplies float activations."""

    def rule(call, producer):
        if ops.name_of(call) != "linear" or FORMATS[call.attrs["formats"][0]].kind != "int8":
            return None
        state, x, *rest = call.args
        tile = target.act_tile(int(call.attrs["m"]))
        if not tile:
            return None
        act = ops.call("quantize", [state, x], act_tile=tile)
        return ops.with_attrs(call, [state, act, *rest], act_tile=tile)

    return rewrite(mod, rule)
