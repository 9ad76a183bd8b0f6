"""Emits attention to compressed keys; `CompressedConfig` has the formula.

The softmax over a block is computed along the sequence as two running sums for each column, of exp(score) * value and
of exp(score). They restart where a block begins: this is an SsmScan whose decay is 0 at such positions, and 1
elsewhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tvm import relax, te

from mlc_amd.compiler.models import decoder_parts, packed
from mlc_amd.compiler.models.compressed.config import SIZE, STEP, CompressedConfig
from mlc_amd.compiler.models.metadata import ROPE
from mlc_amd.schedules.operators import SsmScan
from mlc_amd.schedules.operators.layouts import padded

if TYPE_CHECKING:
    from mlc_amd.compiler.models.graph import Graph

OPS: Any = relax.op
COMPRESSED_ROPE, BLOCK_ROPE, BACK = "compressed_rope", "block_rope", "_back"  # keys of ModelConfig.ropes
MOST = 40.0  # limit of a score's magnitude, so that sums of exp stay finite
# dt of a scan with which a state decays to 0 (ANEW), and with which it does not decay (ON)
ANEW, ON = -128.0, -(2.0**-30)
UNSEEN = -1e30  # the weight that excludes positions within a block from the choice


def attention(g: Graph, h, i: int) -> list:
    """The term of attention of layer i. h: the normed rows."""
    a, block = g.config.layers[i].mixer, f"blk.{i}."
    assert isinstance(a, CompressedConfig)
    rope = COMPRESSED_ROPE if a.ratio else ROPE
    latent = g.rms_norm(g.linear(h, block + "attn_q_a.weight"), block + "attn_q_a_norm.weight")
    q = g.columns(g.linear(latent, block + "attn_q_b.weight"), 0, a.heads * a.head_dim)
    q = _rotated(g, decoder_parts.bare_norm(g, q, a), a.head_dim, rope)
    k = g.columns(g.linear(h, block + "attn_kv.weight"), 0, a.head_dim)
    k = _rotated(g, g.rms_norm(k, block + "attn_kv_a_norm.weight"), a.head_dim, rope)
    op = a.operator(g.ctx, g.m)
    q = g.bb.emit(OPS.reshape(g.scaled(q, op.layer.query_scale), (g.m, a.heads, a.head_dim)))
    given = [_block_keys(g, h, a, i, "attn_compressor", a.head_dim)] if a.ratio else []
    if a.chooses(g.ctx):
        given.append(_chosen(g, h, latent, a, i))
    sinks = g.vector(block + "attn_sinks.weight", exact=True)
    kept = [g.parameters[f"{name}.{i}"][0] for name in op.caches]
    found = g.emit(op, [g.rows, g.pages(0), q, k, *given, sinks, *kept])
    y = _rotated(g, g.bb.emit(relax.TupleGetItem(found, 0)), a.head_dim, rope + BACK)
    return [g.linear(g.head_linear(y, block + "attn_output_a.weight"), block + "attn_output_b.weight")]


def _rotated(g: Graph, x, columns: int, name: str) -> relax.Var:
    """x with the last columns of each head rotated. columns: of a head."""
    rope = g.config.ropes[name]
    return packed.rotated(g, x, g.parameters[f"{name}.table"][0], columns, rope, columns - rope.dim)


def _block_keys(g: Graph, h, a: CompressedConfig, i: int, name: str, dim: int) -> relax.Var:
    """For each row, the key of the block that ends there. Rows within a block get values that are not used."""
    block, columns, sums = f"blk.{i}.{name}_", a.columns(dim), a.sums(dim)
    value, gate = (g.columns(g.linear(h, f"{block}{which}.weight"), 0, columns) for which in ("kv", "gate"))

    def placed(rows):
        def element(r):
            position: Any = te.max(rows[r, 0], 0)
            return position % a.ratio

        return te.compute((g.m,), element, "places")

    places = g.bb.emit_te(placed, g.rows, primfunc_name_hint="places_in_blocks")
    ape = g.columns(decoder_parts.embedded(g, f"{block}ape.weight", places), 0, columns)
    score = g.bb.emit(OPS.exp(decoder_parts.clamped(g, g.bb.emit(OPS.add(gate, ape)), MOST)))

    def step_of(position, part):
        """dt of a running sum. part: 0 for blocks with even numbers, 1 for odd ones, 2 for all blocks. In other blocks
        dt is 0: nothing is added."""
        begins = position % a.ratio == 0
        other: Any = (part < 2) & (position // a.ratio % 2 != part) if a.overlapping else False
        return te.if_then_else(other, 0.0, te.if_then_else(begins, ANEW, ON))

    def inputs(rows, value, score):
        def element(r, c: Any):
            part, column = c // (2 * dim), c % dim
            source = te.max(te.min(column + te.if_then_else(part == 2, dim, 0), columns - 1), 0)
            of = te.if_then_else(c // dim % 2 == 0, value[r, source], 1.0) * score[r, source]
            step = step_of(rows[r, 0], part)
            x = te.if_then_else(step == 0.0, 0.0, of / te.if_then_else(step == 0.0, 1.0, step))
            return te.if_then_else(c < sums, x, te.if_then_else((c - sums) % SIZE == 0, 1.0, 0.0))

        return te.compute((g.m, sums + 2 * SIZE), element, "summed")

    def steps(rows):
        return te.compute(
            (g.m, padded(sums // STEP)), lambda r, head: step_of(rows[r, 0], head * STEP // (2 * dim)), "steps"
        )

    op = SsmScan(
        heads=sums // STEP, d=STEP, size=SIZE, groups=1, single=g.spec.single, m=g.m, given=True, gated=False
    )  # fmt: skip
    x = g.bb.emit_te(inputs, g.rows, value, score, primfunc_name_hint="block_sums")
    dt = g.bb.emit_te(steps, g.rows, primfunc_name_hint="block_steps")
    y = g.run(op, [x, dt, g.ones(sums // STEP)], i, name)

    def average(rows, y):
        def element(r, c):
            if not a.overlapping:
                return y[r, c] / y[r, dim + c]
            before = (rows[r, 0] // a.ratio + 1) % 2 * 2 * dim
            return (y[r, before + c] + y[r, 4 * dim + c]) / (y[r, before + dim + c] + y[r, 5 * dim + c])

        return te.compute((g.m, dim), element, "averaged")

    k = g.bb.emit_te(average, g.rows, y, primfunc_name_hint="block_averages")
    return _rotated(g, g.rms_norm(k, f"{block}norm.weight"), dim, f"{BLOCK_ROPE}{a.ratio}")


def _chosen(g: Graph, h, latent, a: CompressedConfig, i: int) -> relax.Var:
    """The blocks to which each row attends, as the positions at which they end."""
    block, heads, dim = f"blk.{i}.indexer.", a.index_heads, a.index_dim
    op = a.chooser(g.ctx, g.m)
    q = g.columns(g.linear(latent, block + "attn_q_b.weight"), 0, heads * dim)
    q, w = _rotated(g, q, dim, COMPRESSED_ROPE), g.linear(h, block + "proj.weight", exact=True)
    k = _block_keys(g, h, a, i, "indexer_compressor", dim)

    def queries(q):
        def element(r, c: Any):
            head: Any = te.min(c // op.d, heads)
            place: Any = te.min(head, heads - 1)
            column = c % op.d
            own = q[r, place * dim + te.min(column, dim - 1)]
            last = te.if_then_else((head == heads) & (column == dim), 1.0, 0.0)
            return te.if_then_else((head < heads) & (column < dim), own, last)

        return te.compute((g.m, padded(op.heads * op.d)), element, "queries")

    def weights(w):
        def element(r, head):
            own = w[r, te.min(head, heads - 1)] * (heads * dim) ** -0.5
            return te.if_then_else(head < heads, own, te.if_then_else(head == heads, UNSEEN, 0.0))

        return te.compute((g.m, padded(op.heads)), element, "weights")

    def keys(rows, k):
        def element(r, c):
            within = te.if_then_else((c == dim) & ((rows[r, 0] + 1) % a.ratio != 0), 1.0, 0.0)
            return te.if_then_else(c < dim, k[r, te.min(c, dim - 1)], within)

        return te.compute((g.m, padded(op.d)), element, "keys")

    inputs = [
        g.bb.emit_te(queries, q, primfunc_name_hint="index_queries"),
        g.bb.emit_te(weights, w, primfunc_name_hint="index_weights"),
        g.bb.emit_te(keys, g.rows, k, primfunc_name_hint="index_keys"),
    ]
    found = g.emit(op, [g.rows, g.pages(0), *inputs, g.parameters[f"ik.{i}"][0]])
    return g.bb.emit(relax.TupleGetItem(found, 0))
