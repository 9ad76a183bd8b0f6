"""attention(rope_kv_write(q, k, v)) of single rows becomes one `rope_attention`, for targets whose decode attention
rotates for itself."""

from typing import cast

from mlc_amd.compiler import ops
from mlc_amd.compiler.passes.rewrite import rewrite
from mlc_amd.schedules.operators import CausalAttention, RopeAttention, RopeKvWrite


def fuse_rope(mod, target):
    def rule(call, producer):
        op = ops.operator_of(call)
        if not isinstance(op, CausalAttention) or not target.fuses_rope or op.m != op.single:
            return None
        if op.layer.values:
            return None  # latent attention has a kernel of its own for that
        state, rows, pages, rotated, *rest = call.args
        caches = len(op.layer.cache)
        cache, rest = rest[:caches], rest[caches:]  # [sinks], workspace
        rope = producer(rotated)
        if isinstance(ops.operator_of(rope), RopeKvWrite):
            inputs = [*rope.args[2:], *cache]
        else:  # q is the first of its outputs, and the caches are its last inputs
            rope = producer(rope.tuple_value)
            inputs = rope.args[3:]
        rotation = cast(RopeKvWrite, ops.operator_of(rope)).rope
        fused = RopeAttention(layer=op.layer, rope=rotation, layout=op.layout, m=op.m)
        return ops.call(fused, [state, rows, pages, *inputs, *rest])

    return rewrite(mod, rule)
