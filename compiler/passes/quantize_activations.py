"""Inserts `quantize` before every linear that does not take float32 activations, in the layout that the target's
linears want."""

from dataclasses import replace

from mlc_amd.compiler import ops
from mlc_amd.compiler.passes.rewrite import rewrite
from mlc_amd.schedules.formats import FORMATS
from mlc_amd.schedules.operators import ExpertDown, ExpertGateUp, ExpertLinear, HeadLinear, Linear, Quantize

BLOCK = 32  # columns
LINEARS = (Linear, HeadLinear, ExpertGateUp, ExpertLinear, ExpertDown)


def quantize_activations(mod, target):
    def rule(call, producer):
        op = ops.operator_of(call)
        if not isinstance(op, LINEARS) or (isinstance(op, Linear) and op.exact):
            return None
        layout_of = {Linear: target.act_layout, HeadLinear: target.head_layout}.get(type(op))
        if layout_of and op.k % BLOCK:
            return None  # float weights: no layout of ours has part of a block
        formats = [FORMATS[fmt] for fmt in op.formats]
        layout = layout_of(op.m, formats[0].kind) if layout_of else target.expert_layout(op.m, formats)
        if not layout:
            return None
        state, x, *rest = call.args
        m, k = ops.shape_of(x)
        quantized = ops.call(Quantize(m=m, k=k, layout=layout), [state, x])
        takes = replace(op, layout_in=layout) if isinstance(op, ExpertGateUp) else replace(op, layout=layout)
        return ops.call(takes, [state, quantized, *rest])

    return rewrite(mod, rule)
