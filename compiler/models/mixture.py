"""Emits a mixture of experts: the choice of each row's experts, and the weighted sum of their results."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tvm import relax, te

from mlc_amd.compiler.models import exchanges
from mlc_amd.compiler.models.config import ExpertsConfig
from mlc_amd.compiler.models.decoder_parts import embedded
from mlc_amd.compiler.models.tensors import EXPERT_TABLE, factor_names
from mlc_amd.compiler.ops import shape_of, tensor_type
from mlc_amd.schedules.operators import Combine, ExpertDown, ExpertGateUp, ExpertLinear, ExpertOrder, Gather, Route
from mlc_amd.schedules.operators.experts import MIN_SUM

if TYPE_CHECKING:
    from mlc_amd.compiler.models.graph import Graph

OPS: Any = relax.op


def route(g: Graph, logits, experts: ExpertsConfig, block: str) -> tuple[relax.Var, relax.Var]:
    """(experts of each row, their weights). block: the prefix of the tensors' names, "blk.0."."""
    if experts.table:
        return _route_by_token(g, logits, experts, block)
    bias = [g.vector(block + experts.bias_name)] if experts.selection_bias else []
    after = factor_names(block)[1]
    factors = [g.vector(after)] if g.has(after) and not experts.weigh_input else []
    workspace = g.target.route_workspace(experts) if g.m == 1 else {}
    buffers = [g.parameter(name, "kv", tensor_type(*of)) for name, of in workspace.items()]
    m, n = shape_of(logits)
    op = Route(
        n=n, m=m, **_experts(g, experts), gating=experts.gating, normalize=experts.normalize, scale=experts.scale,
        bias=bool(bias), factors=bool(factors), groups=experts.groups, groups_used=experts.groups_used,
    )  # fmt: skip
    routed = g.emit(op, [logits, *bias, *factors, *buffers])
    ids, weights = (g.bb.emit(relax.TupleGetItem(routed, i)) for i in range(2))
    return ids, weights


def _route_by_token(g: Graph, logits, experts: ExpertsConfig, block: str) -> tuple[relax.Var, relax.Var]:
    """`route` for a layer in which a table has the experts of each token; only weights depend on the logits."""

    def numbered(tokens):
        return te.compute((g.m,), lambda row: te.max(te.min(tokens[row], experts.table - 1), 0), "numbered")

    def choose(found):
        def element(row, i):
            return te.max(te.min(found[row, i].astype("int32"), experts.count - 1), 0)

        return te.compute((g.m, experts.used), element, "chosen")

    def weigh(logits, ids):
        def element(row, i):
            x = logits[row, ids[row, i]]
            return te.sqrt(te.max(x, 0.0) + te.log(1.0 + te.exp(-te.abs(x))))

        return te.compute((g.m, experts.used), element, "weighed")

    table = embedded(g, block + EXPERT_TABLE, g.bb.emit_te(numbered, g.tokens, primfunc_name_hint="token_numbers"))
    ids = g.bb.emit_te(choose, table, primfunc_name_hint="experts_of_tokens")
    weights = g.bb.emit_te(weigh, logits, ids, primfunc_name_hint="weigh_experts")
    if experts.normalize:
        total = g.bb.emit(OPS.sum(weights, -1, keepdims=True))
        weights = g.bb.emit(OPS.divide(weights, g.bb.emit(OPS.maximum(total, relax.const(MIN_SUM, "float32")))))
    if (factors := chosen(g, factor_names(block)[1], ids)) is not None:
        weights = g.multiply(weights, factors)
    return ids, g.scaled(weights, experts.scale)


def adjugate(g: Graph, x, logits, ids, experts: ExpertsConfig, block: str) -> list:
    """The terms of the adjugate experts, which read x, the sum of the experts `ids`. As in llama.cpp, their weights are
    the probabilities of the experts of the same numbers, divided by their sum."""
    of = experts.adjugate
    assert of, "experts with adjugate ones"

    def choose(ids):
        return te.compute((g.m, of.used), lambda row, i: ids[row, i] // of.group, "adjugate")

    def weigh(logits, ids):
        def logit(row, i):
            return logits[row, te.max(te.min(ids[row, i], experts.count - 1), 0)]

        return te.compute((g.m, of.used), logit, "chosen_logits")

    own = g.bb.emit_te(choose, ids, primfunc_name_hint="adjugate_experts")
    weights = g.bb.emit(relax.op.nn.softmax(g.bb.emit_te(weigh, logits, own, primfunc_name_hint="adjugate_logits"), -1))
    small = replace(experts, count=of.count, used=of.used, size=of.size, merged=False, adjugate=None)
    y = mixed(g, x, own, weights, small, block, "chexps")
    return [exchanges.terms_of(g, g.bb.emit(relax.op.multiply(y, relax.const(of.factor, "float32"))), y)]


def mixed(g: Graph, x, ids, weights, experts: ExpertsConfig, block: str, suffix: str = "exps") -> relax.Var:
    """The weighted sum of the experts `ids` of each row of x. Their weights are <block>ffn_gate_<suffix> and so on."""
    of, m, k = _experts(g, experts), g.m, shape_of(x)[1]
    names = {"gate": "gate" if experts.gated else "up", "up": "up", "down": "down"}
    stacks = {which: g.model.tensors[f"{block}ffn_{name}_{suffix}.weight"] for which, name in names.items()}
    weight = {which: g.weight(f"{block}ffn_{name}_{suffix}.weight") for which, name in names.items()}
    bias = {name: [g.vector(f"{block}ffn_{name}_{suffix}.bias")] if experts.biases else [] for name in stacks}
    size = stacks["up"].shape[1]
    first, last = (chosen(g, name, ids) if suffix == "exps" else None for name in factor_names(block))
    if experts.weigh_input:
        before, after = (
            [g.multiply(weights, first) if first is not None else weights],
            [] if last is None else [last],
        )
    else:  # `route` has multiplied the weights by the factors of outputs
        before, after = [] if first is None else [first], [weights]
    slots, pairs, groups = None, [], ids
    if of["tile"] > 1:
        ordered = g.emit(ExpertOrder(m=m, **of), [ids])
        slots, pair_of, groups = (g.bb.emit(relax.TupleGetItem(ordered, i)) for i in range(3))
        pairs = [pair_of]
    if pairs or before:
        x = g.emit(Gather(k=k, m=m, **of, weighted=bool(before), layout=""), [x, *pairs, *before])
    gate_up = ExpertGateUp(
        gate=stacks["gate"].format, up=stacks["up"].format, n=size, k=k, m=m, **of, act=experts.act,
        biases=experts.biases, layout_in="", layout="", shared=of["tile"] == 1 and shape_of(x)[0] == m,
    )  # fmt: skip
    h = g.emit(gate_up, [x, groups, weight["gate"], weight["up"], *bias["gate"], *bias["up"]])
    name = f"{block}ffn_down_{suffix}.weight"
    down: Any = {"fmt": stacks["down"].format, "n": k, "k": size, "m": m, "bias": experts.biases, "layout": ""} | of
    inputs = [h, groups, weight["down"], *bias["down"]]
    if not pairs:
        op = ExpertDown(**down, weighted=bool(after), residual=False)
        return exchanges.term(g, g.emit(op, [*inputs, *after]), name)
    y = g.emit(ExpertLinear(**down), inputs)
    combine = Combine(n=shape_of(y)[1], m=m, **of, weighted=bool(after), residual=False)
    return exchanges.term(g, g.emit(combine, [y, slots, *after]), name)


def chosen(g: Graph, name: str, ids) -> relax.Var | None:
    """The entries of the vector `name` for the experts `ids`, with the shape of ids; None if the file has no such
    vector."""
    if not g.has(name):
        return None

    def choose(ids, values):
        last = g.model.tensors[name].shape[0] - 1
        return te.compute(ids.shape, lambda *at: values[te.max(te.min(ids[at], last), 0)], "chosen")

    return g.bb.emit_te(choose, ids, g.vector(name), primfunc_name_hint="choose_factors")


def _experts(g: Graph, experts: ExpertsConfig) -> dict[str, int]:
    return {"experts": experts.count, "used": experts.used, "tile": g.target.expert_tile(g.m)}
