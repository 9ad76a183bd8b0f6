"""attention(rope_kv_write(q, k, v)) of single rows becomes one `rope_attention`, for targets whose decode attention
rotates for itself."""

from mlc_amd.compiler import ops
from mlc_amd.compiler.passes.rewrite import rewrite
from mlc_amd.runtime.cache.kv_types import KV_TENSORS


def fuse_rope(mod, target):
    def rule(call, producer):
        if ops.name_of(call) != "attention" or not target.fuses_rope:
            return None
        if ops.shape_of(call.args[3])[0] != int(call.attrs["single"]):
            return None
        if int(call.attrs["values"]):
            return None  # latent attention has a kernel of its own for that
        state, rows, pages, rotated, *rest = call.args
        caches = len(KV_TENSORS[str(call.attrs["kv"])])
        cache, rest = rest[:caches], rest[caches:]  # [sinks], workspace
        rope = producer(rotated)
        if ops.name_of(rope) == "rope_kv_write":
            inputs = [*rope.args[2:], *cache]
        else:  # q is the first of its outputs, and the caches are its last inputs
            rope = producer(rope.tuple_value)
            inputs = rope.args[3:]
        attrs = {key: rope.attrs[key] for key in ops.ROPE}
        attrs |= {key: call.attrs[key] for key in (*ops.ATTENTION, "layout")}
        return ops.call("rope_attention", [state, rows, pages, *inputs, *rest], **attrs)

    return rewrite(mod, rule)
