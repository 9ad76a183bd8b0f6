"""attention(rope_kv_write(q, k, v)) of one token becomes one `rope_attention`, for targets whose decode attention
rotates for itself."""

from mlc_amd.compiler import ops
from mlc_amd.compiler.passes.rewrite import rewrite


def fuse_rope(mod, target):
    def rule(call, producer):
        if ops.name_of(call) != "attention" or ops.shape_of(call.args[1])[0] != 1 or not target.fuses_rope:
            return None
        state, rotated, _keys, _values, *rest = call.args  # [sinks], workspace
        written = producer(rotated).tuple_value  # q is the first output of rope_kv_write
        rope = producer(written)
        attrs = {key: rope.attrs[key] for key in ("neox", "rotary", "head_norm", "eps")}
        attrs |= {key: call.attrs[key] for key in (*ops.ATTENTION, "layout")}
        return ops.call("rope_attention", [state, *rope.args[1:], *rest], **attrs)

    return rewrite(mod, rule)
