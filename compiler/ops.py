"""The decoder's operators as Relax operators of our own: `mlc_amd.<name>`, with attributes and type inference.

The models emit the plain ones; the passes rewrite them into fused forms (more inputs or attributes, never other names);
each target turns them into TensorIR kernels. Every operator takes `state` first: int32[4] = (single rows, live rows, 0,
0). A step computes m rows, of which the first ones are live. Of these the first `single` are the newest tokens of as
many sequences, and the others are a chunk: consecutive tokens of one sequence.

Values
    x          float32 [m, k]
    layout     how x is stored where a linear reads it: a name of LAYOUTS, which the target chooses
    weight     tuple of planes, the packed form of one GGUF tensor (schedules' `planes`)
    rows       int32 [m, 2]: the position of each row in its sequence, and its slot
    pages      int32 [SLOTS, ctx/64]: the page of each slot's block of 64 positions
    cache      the tensors of schedules.attention.KV_TENSORS
    cells      int32 [SLOTS, COLUMNS]: the cell that has each slot's state, and those for the states behind its rows
    states     float32 [cells, ..]: what a layer keeps of each sequence from step to step
"""

import math
from dataclasses import fields
from typing import Any

import tvm
import tvm_ffi
from tvm import relax
from tvm.ir import Op

from mlc_amd.compiler.nodes import fields_of, parts_of
from mlc_amd.runtime.cache.kv_types import KV_TENSORS, LATENT_TENSORS
from mlc_amd.schedules.attention import Attention, Rope, padded_columns
from mlc_amd.schedules.experts import Experts
from mlc_amd.schedules.rows import output_rows

PREFIX = "mlc_amd."


def tensor_type(shape, dtype="float32"):
    sizes: list[Any] = [int(s) for s in shape]  # TVM makes expressions of them
    return relax.TensorType(sizes, dtype)


def _tiles(m: int, k: int, p: int):
    tiles = math.ceil(m / p)
    return relax.TupleType([tensor_type((tiles, k // 32, p, 32), "int8"), tensor_type((tiles, k // 32, 8, p))])


def _rows(m: int, k: int):
    return relax.TupleType([tensor_type((m, k // 32, 32), "int8"), tensor_type((m, k // 32, 4))])


# name, and a number behind a colon where the layout has one: type of m rows of k columns
LAYOUTS = {
    "": lambda m, k: tensor_type((m, k)),  # float32
    "tiles": _tiles,  # int8 blocks of 32 columns, p tokens side by side: schedules/cpu/linear/quantize.py
    "rows": _rows,  # int8 blocks of 32 columns: schedules/gpu/base/quantize.py
    "half": lambda m, k: tensor_type((m, k), "float16"),
    "pairs": lambda m, k: tensor_type(
        (m, k), "float16"
    ),  # blocks of 32 columns in another order: schedules/gpu/base/pairs.py
    "lanes": lambda m, k: tensor_type((math.ceil(m / 8), math.ceil(k / 128), 1024), "float16"),  # there, too
}


def layout_type(m: int, k: int, layout: str):
    """Type of `m` rows of `k` columns in a layout such as "tiles:16"."""
    name, _, number = layout.partition(":")
    return LAYOUTS[name](m, k, *([int(number)] if number else []))


def padded(n: int) -> int:
    """Rows of a packed weight: tiles of 16."""
    return math.ceil(n / 16) * 16


def shape_of(value) -> list[int]:
    return [int(s) for s in value.ty.shape.values]


def rows_of(value) -> int:
    """Rows of activations in the layout "" or "rows", or of one row in any."""
    ty = fields_of(value.ty)[0] if isinstance(value.ty, relax.TupleType) else value.ty
    return int(ty.shape.values[0])


def _embed(call, bb):
    return tensor_type((shape_of(call.args[1])[0], int(call.attrs["k"])))


def gives_both(call) -> bool:
    """Whether a norm gives its float32 result, too."""
    return "both" in call.attrs.keys()  # noqa: SIM118 (not a dict)


def normed(call) -> bool:
    """Whether a linear or gate_up computes the norm of its input."""
    return "eps" in call.attrs.keys()  # noqa: SIM118 (not a dict)


def completes_norm(call) -> bool:
    """Whether a linear or gate_up completes the norm of its input."""
    return "norm_in" in call.attrs.keys()  # noqa: SIM118 (not a dict)


def prepares_norm(call) -> bool:
    """Whether a linear prepares the norm of its result."""
    return "norm_out" in call.attrs.keys()  # noqa: SIM118 (not a dict)


def gives_scale(call) -> bool:
    """Whether an rms_norm gives its scales, too."""
    return "scale_out" in call.attrs.keys()  # noqa: SIM118 (not a dict)


def _with(ty, *more):
    """The type of an operator's result with other outputs behind it."""
    return relax.TupleType([*parts_of(ty), *more]) if more else ty


def _rms_norm(call, bb):
    m, k = shape_of(call.args[1])
    rows = output_rows(str(call.attrs["rows"]), m)
    both = [tensor_type((rows, k))] if gives_both(call) else []
    scales = [tensor_type((rows,))] if gives_scale(call) else []
    return _with(layout_type(rows, k, str(call.attrs["layout"])), *both, *scales)


def _quantize(call, bb):
    m, k = shape_of(call.args[1])
    return layout_type(m, k, str(call.attrs["layout"]))


def _linear(call, bb):
    m, n = int(call.attrs["m"]), [int(n) for n in call.attrs["n"]]
    types = [tensor_type((m, padded(each))) for each in n]
    if prepares_norm(call):
        types += [layout_type(m, n[0], "lanes"), tensor_type((m, n[0] // 16))]
    if completes_norm(call):
        types.append(tensor_type((m,)))
    return types[0] if len(types) == 1 else relax.TupleType(types)


def _gate_up(call, bb):
    m, n = int(call.attrs["m"]), int(call.attrs["n"])
    scales = [tensor_type((m,))] if completes_norm(call) else []
    return _with(layout_type(m, n, str(call.attrs["layout"])), *scales)


def _rope_kv_write(call, bb):
    heads, width = int(call.attrs["heads"]), padded_columns(int(call.attrs["d"]))
    writes = int(call.attrs["writes"])
    m = shape_of(call.args[3 if writes else 2])[0]
    q = tensor_type((m, heads, width), str(call.attrs["query_dtype"]))
    if not writes:
        return q
    return relax.TupleType([q, *(cache.ty for cache in call.args[-len(KV_TENSORS[str(call.attrs["kv"])]) :])])


def _head_linear(call, bb):
    return tensor_type((int(call.attrs["m"]), int(call.attrs["heads"]) * int(call.attrs["n"])))


def _latent_kv_write(call, bb):
    heads, width = int(call.attrs["heads"]), padded_columns(int(call.attrs["d"]))
    q = tensor_type((shape_of(call.args[3])[0], heads, width), str(call.attrs["query_dtype"]))
    return relax.TupleType([q, *(cache.ty for cache in call.args[-len(LATENT_TENSORS) :])])


def value_columns(call) -> int:
    """Columns of a head of an attention operator's result."""
    return int(call.attrs["values"]) or int(call.attrs["d"])


def _attention(call, bb):
    columns = int(call.attrs["heads"]) * value_columns(call)
    return layout_type(shape_of(call.args[3])[0], columns, str(call.attrs["layout"]))


def _rope_attention(call, bb):
    columns = int(call.attrs["heads"]) * int(call.attrs["d"])
    return layout_type(shape_of(call.args[3])[0], columns, str(call.attrs["layout"]))


def _causal_conv(call, bb):
    y = tensor_type((shape_of(call.args[3])[0], int(call.attrs["channels"])))
    return relax.TupleType([y, call.args[-1].ty])


def _channel_decay(call, bb):
    return tensor_type((shape_of(call.args[1])[0], int(call.attrs["heads"]) * int(call.attrs["d"])))


def _delta_net(call, bb):
    columns = int(call.attrs["value_heads"]) * int(call.attrs["d"])
    return relax.TupleType([tensor_type((shape_of(call.args[3])[0], columns)), call.args[-1].ty])


def _ssm_scan(call, bb):
    columns = int(call.attrs["heads"]) * int(call.attrs["d"])
    return relax.TupleType([tensor_type((shape_of(call.args[3])[0], columns)), call.args[-1].ty])


def _gate(call, bb):
    rows, columns = shape_of(call.args[1])
    return layout_type(rows, columns, str(call.attrs["layout"]))


def _layer_norm(call, bb):
    return _rms_norm(call, bb)


def experts_of(call) -> Experts:
    """The `Experts` of an operator that has the attributes EXPERTS."""
    return Experts(*(int(call.attrs[key]) for key in EXPERTS))


def _route(call, bb):
    return relax.TupleType(_choice(shape_of(call.args[1])[0], call))


def _choice(m: int, call) -> list:
    used = int(call.attrs["used"])
    return [tensor_type((m, used), "int32"), tensor_type((m, used))]


def _norm_route(call, bb):
    k = shape_of(call.args[1])[1]
    outputs = [*parts_of(layout_type(1, k, str(call.attrs["layout"]))), *([tensor_type((1, k))] * gives_both(call))]
    return relax.TupleType([*outputs, *_choice(1, call)])


def _expert_order(call, bb):
    experts, m = experts_of(call), shape_of(call.args[1])[0]
    shapes = (m, experts.used), (experts.slots(m),), (experts.groups(m),)
    return relax.TupleType([tensor_type(shape, "int32") for shape in shapes])


def _gather(call, bb):
    m, k = shape_of(call.args[1])
    return layout_type(experts_of(call).slots(m), k, str(call.attrs["layout"]))


def _expert_gate_up(call, bb):
    return layout_type(experts_of(call).slots(int(call.attrs["m"])), int(call.attrs["n"]), str(call.attrs["layout"]))


def _expert_linear(call, bb):
    return tensor_type((experts_of(call).slots(int(call.attrs["m"])), padded(int(call.attrs["n"]))))


def _expert_down(call, bb):
    return tensor_type((int(call.attrs["m"]), padded(int(call.attrs["n"]))))


def _combine(call, bb):
    return tensor_type((int(call.attrs["m"]), shape_of(call.args[1])[1]))


def _sample(call, bb):
    n, columns = shape_of(call.args[1])
    return relax.TupleType([tensor_type((n,), "int32"), tensor_type((n,)), tensor_type((n, columns))])


EXPERTS = ("experts", "used", "tile")  # attributes, as of schedules.experts.Experts
ROUTING = ("gating", "normalize", "scale", "bias", "factors", "groups", "groups_used")  # attributes
ATTENTION = tuple(field.name for field in fields(Attention))  # attributes
ROPE = (*(field.name for field in fields(Rope)), "head_norm")  # attributes; without head_norm eps does not count

# name: (type inference, what it computes; arguments after `state`; attributes)
OPS = {
    "embed": (_embed, "rows of the embedding table times scale: (tokens int32[m], weight); format, vocab, k, scale"),
    "rms_norm": (
        _rms_norm,
        "x / rms(x) * g: (x, g); eps, rows (of the result: schedules/rows.py), layout (of the result), both: behind "
        "its parts there is the float32 result, scale_out: at the end 1 / rms(x)",
    ),
    "layer_norm": (
        _layer_norm,
        "(x - mean(x)) / deviation(x) * g + b: (x, g, [b]); eps, bias, rows, layout and both as of rms_norm",
    ),
    "quantize": (_quantize, "x in a layout: (x,); layout"),
    "linear": (
        _linear,
        "x W^T for each W: (x, weights.., biases.., residual?); formats, n, biases, residual, k, m, layout (of x), "
        "exact (x stays float32); eps: of rms_norm(x, g), and g follows x. norm_in: eps of a norm that it completes: "
        "squares and scale follow x, and the norm's scales its results; norm_out: it prepares one: g and scale behind "
        "all others, x * g and squares behind its result (schedules/gpu/linear/deferred_norm.py)",
    ),
    "head_linear": (
        _head_linear,
        "x W^T with a matrix W for each head's columns of x: (x, W); formats, heads, n and k (of a head), m, layout "
        "(of x)",
    ),
    "gate_up": (
        _gate_up,
        "act(x G^T) * (x U^T): (x, G, U); formats, n, k, m, act, layout_in (of x), layout (of the result), eps and "
        "norm_in as of linear",
    ),
    "rope_kv_write": (
        _rope_kv_write,
        "head norms, RoPE, KV write in place: (rows, pages, q, k, v, [qn, kn], [cos_sin], cache..) to (q, cache..), "
        "without `writes` (rows, q, [qn], [cos_sin]) to q; ATTENTION, ROPE and query_dtype",
    ),
    "latent_kv_write": (
        _latent_kv_write,
        "of latent attention: norm of the latent, RoPE, KV write in place: (rows, pages, q's rotating columns, q's "
        "columns for the latent, the latent and the key's rotating columns, norm's weight, [cos_sin], cache) to (q, "
        "cache); ATTENTION, neox and rotary of ROPE, eps and query_dtype",
    ),
    "attention": (
        _attention,
        "causal attention: (rows, pages, q, cache.., [sinks], workspace..); ATTENTION, layout (of the result) and "
        "single: how many rows may be single ones",
    ),
    "rope_attention": (
        _rope_attention,
        "both of single rows, the cache written in place: (rows, pages, q, k, v, [qn, kn], [cos_sin], cache.., "
        "[sinks], workspace..), without `writes` no k, v, kn; ATTENTION, ROPE and layout",
    ),
    "causal_conv": (
        _causal_conv,
        "act(conv(x) + b), conv over the last `taps` positions of each column; gated: x is [B, C, X], and it is C * "
        "conv(B * X): (rows, cells, x.., w.., [b], states) to (y, states in place); channels, taps, gated, act, bias, "
        "parts: how many x and w there are, of as many columns each, side by side; single: how many rows may be single "
        "ones",
    ),
    "delta_net": (
        _delta_net,
        "a gated delta rule (config.DeltaNetConfig): (rows, cells, qkv, beta, alpha, a, dt, states), or by_channel "
        "(rows, cells, qkv, beta, decay, states), to (y, states in place); key_heads, value_heads, d (of a head), "
        "grouped, eps (of the lengths of q and k), by_channel, single",
    ),
    "channel_decay": (
        _channel_decay,
        "exp(a * softplus(x + dt)), what a delta net keeps of each channel: (x, a, dt); heads, which have an a each, "
        "and d (of a head)",
    ),
    "gate": (
        _gate,
        "y * sigmoid(z), or y * silu(z): (x, z, [g]); y is x, or with g its RMS norm over each `size` columns; silu, "
        "size, normed, eps, layout (of the result)",
    ),
    # of a mixture of experts: schedules/experts.py has the meaning of ids, slots, pairs and groups
    "route": (
        _route,
        "experts of each row, and their weights: (logits, [selection bias], [experts' factors], workspace..) to (ids, "
        "weights); EXPERTS and ROUTING",
    ),
    "norm_route": (
        _norm_route,
        "a norm of one row, and route of its product with W: (x, g, W, [W's bias], [selection bias], [experts' "
        "factors], workspace..) to (the norm's results.., ids, weights); EXPERTS, ROUTING, format and router_bias (of "
        "W), eps, layout and both as of rms_norm",
    ),
    "expert_order": (_expert_order, "rows sorted by expert: (ids,) to (slots, pairs, groups); EXPERTS"),
    "gather": (
        _gather,
        "the rows of x in slots, times their weights: (x, [pairs], [weights]); EXPERTS and weighted, layout. Without "
        "pairs they are not sorted",
    ),
    "expert_gate_up": (
        _expert_gate_up,
        "act(x G^T) * (x U^T) of each slot's expert: (x, groups, G, U, [G's and U's biases]); EXPERTS and formats, n, "
        "k, m, act, biases, layout_in, layout. x has a row for each slot, or for all slots of a row",
    ),
    "expert_linear": (
        _expert_linear,
        "x W^T of each slot's expert: (x, groups, W, [bias]); EXPERTS and formats, n, k, m, biases, layout (of x)",
    ),
    "combine": (
        _combine,
        "the sum of a row's slots, times their weights: (y, slots, [weights], [residual]); EXPERTS and weighted, m, "
        "residual",
    ),
    "expert_down": (
        _expert_down,
        "combine(expert_linear) of rows that are not sorted: (x, ids, W, [bias], [weights], [residual]); EXPERTS and "
        "formats, n, k, m, biases, weighted, residual, layout (of x)",
    ),
    "ssm_scan": (
        _ssm_scan,
        "Mamba-2: (rows, cells, x, z, dt, a, d, dt's bias, states) to (y, states in place), see schedules/gpu/"
        "ssm_scan.py; heads, d (columns of x of a head), size (of B and C), groups, single as of causal_conv",
    ),
    "sample": (
        _sample,
        "a token for each row: (logits, sampling, changes, allowed), of which all but the first are those of "
        "runtime/sampling/layout.py, to (ids, log-probabilities, workspace); vocab (columns of the logits that count)",
    ),
}


def _register(name, infer, description):
    tvm_ffi.get_global_func("ir.RegisterOp")(PREFIX + name, description)
    op = Op.get(PREFIX + name)
    op.set_num_inputs(-1)
    op.set_attr("FInferType", infer)
    op.set_attr("FPurity", True)
    return op


_registered = {name: _register(name, infer, description) for name, (infer, description) in OPS.items()}


def call(name: str, args, **attrs) -> relax.Call:
    """A call of `mlc_amd.<name>`; attributes are ints, floats, strings or lists of them."""
    return relax.Call(_registered[name], list(args), tvm.ir.make_node("ir.DictAttrs", **attrs))


def name_of(value) -> str:
    """`linear` for a call of mlc_amd.linear; "" for anything else."""
    op = getattr(value, "op", None)
    name = getattr(op, "name", "") if isinstance(op, Op) else ""
    return name.removeprefix(PREFIX) if name.startswith(PREFIX) else ""


def with_attrs(value: relax.Call, args=None, **changes) -> relax.Call:
    """The same operator with other arguments or attributes."""
    old: Any = value.attrs
    attrs = {key: old[key] for key in old.keys()} | changes  # noqa: SIM118 (not a dict)
    return call(name_of(value), value.args if args is None else args, **attrs)
