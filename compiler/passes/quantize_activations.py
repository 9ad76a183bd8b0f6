"""Inserts `quantize` before every linear that does not take float32 activations, in the layout that the target's
linears want."""

from mlc_amd.compiler import ops
from mlc_amd.compiler.passes.rewrite import rewrite
from mlc_amd.schedules.formats import FORMATS

BLOCK = 32  # columns
# operator: its attribute with the layout of x
LINEARS = {
    "linear": "layout",
    "head_linear": "layout",
    "expert_gate_up": "layout_in",
    "expert_linear": "layout",
    "expert_down": "layout",
}


def quantize_activations(mod, target):
    def rule(call, producer):
        name, kind = ops.name_of(call), LINEARS.get(ops.name_of(call))
        if kind is None or (name == "linear" and int(call.attrs["exact"])):
            return None
        layout_of = {"linear": target.act_layout, "head_linear": target.head_layout}.get(name)
        if layout_of and int(call.attrs["k"]) % BLOCK:
            return None  # float weights: no layout of ours has part of a block
        m, formats = int(call.attrs["m"]), [FORMATS[fmt] for fmt in call.attrs["formats"]]
        layout = layout_of(m, formats[0].kind) if layout_of else target.expert_layout(m, formats)
        if not layout:
            return None
        state, x, *rest = call.args
        return ops.with_attrs(call, [state, ops.call("quantize", [state, x], layout=layout), *rest], **{kind: layout})

    return rewrite(mod, rule)
