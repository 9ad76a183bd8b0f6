"""Calls of the project's Relax operators (compiler/ops.py) as calls of kernels.

In: a call, whose attributes and types say all. Out: the workload that its kernel computes (operator, sizes, formats,
attributes), the kernel's label, and which of the call's arguments it takes. Arguments of a workload are what the
kernels' builders take, by name and in their order (schedules/cpu/kernels.py, schedules/gpu/kernels.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from typing import Any, NamedTuple

from mlc_amd.compiler import ops
from mlc_amd.compiler.ops import shape_of
from mlc_amd.runtime.cache.kv_types import KV_TENSORS, LATENT_TENSORS
from mlc_amd.schedules.attention import Attention, Rope
from mlc_amd.schedules.plans.workload import Workload

# What kernels' builders take for arguments that a workload does not name.
ATTENTION_DEFAULTS = {f.name: f.default for f in fields(Attention) if f.default is not MISSING}
ROPE_DEFAULTS = {f.name: f.default for f in fields(Rope) if isinstance(f.default, bool)}
EMBED_DEFAULTS, NORM_DEFAULTS = {"scale": 1.0}, {"both": False, "scale_out": False}
LINEAR_DEFAULTS = {"eps": None, "norm_in": None, "norm_out": False}
GATE_UP_DEFAULTS = {"act": "silu"} | LINEAR_DEFAULTS
NOT_OF_ROPE = ("window", "chunk", "softcap", "sinks")


class KernelCall(NamedTuple):
    """What a call becomes. label: of the kernel, the same for workloads that differ in details only; args: inputs in
    the kernel's order, None: as the call has them; inplace: index of an output to that of the call's argument whose
    place it takes."""

    label: str
    workload: Workload
    args: Sequence[Any] | None = None
    inplace: dict[int, int] | None = None


def kernel_call(call) -> KernelCall:
    return MAKERS[ops.name_of(call)](call)


def _embed(call) -> KernelCall:
    a, m = call.attrs, shape_of(call.args[1])[0]
    args = {"fmt": str(a["format"]), "vocab": int(a["vocab"]), "k": int(a["k"]), "m": m}
    args |= _differing({"scale": float(a["scale"])}, EMBED_DEFAULTS)
    return KernelCall(f"embed_{a['format']}_m{m}", Workload("embed", args))


def _rms_norm(call) -> KernelCall:
    return _norm(call, {})


def _layer_norm(call) -> KernelCall:
    return _norm(call, {"bias": bool(int(call.attrs["bias"]))})


def _norm(call, more: dict) -> KernelCall:
    a, (m, k), name = call.attrs, shape_of(call.args[1]), ops.name_of(call)
    layout, rows, both = str(a["layout"]), str(a["rows"]), ops.gives_both(call)
    args = {"k": k, "m": m, "eps": float(a["eps"])} | more | {"layout": layout, "rows": rows}
    args |= _differing({"both": both, "scale_out": ops.gives_scale(call)}, NORM_DEFAULTS)
    what = "_both" if both else "_quantize" if layout else ""
    which = "" if rows == "all" else f"_{rows.partition(':')[0]}"
    return KernelCall(f"{name}{what}_{k}_m{m}{which}", Workload(name, args))


def _quantize(call) -> KernelCall:
    m, k = shape_of(call.args[1])
    workload = Workload("quantize", {"k": k, "m": m, "layout": str(call.attrs["layout"])})
    return KernelCall(f"quantize_{k}_m{m}", workload)


def _linear(call) -> KernelCall:
    a = call.attrs
    k, m, layout, residual = int(a["k"]), int(a["m"]), str(a["layout"]), bool(int(a["residual"]))
    segments = [(str(f), int(n)) for f, n in zip(a["formats"], a["n"], strict=True)]
    biases = [bool(int(b)) for b in a["biases"]]
    # the operator takes weights, then biases; the kernel takes each bias after its weight
    own = 2 + ops.normed(call) + 2 * ops.completes_norm(call)
    inputs, rest = list(call.args[:own]), list(call.args[own:])
    weights, rest = rest[: len(segments)], rest[len(segments) :]
    ordered = [
        value
        for weight, bias in zip(weights, biases, strict=True)
        for value in ([weight, rest.pop(0)] if bias else [weight])
    ]
    label = f"linear_{'_'.join(dict.fromkeys(f for f, _ in segments))}_{sum(n for _, n in segments)}x{k}_m{m}"
    args = {"segments": segments, "k": k, "m": m, "layout": layout, "biases": biases, "residual": residual}
    args |= _differing(_norms(call), LINEAR_DEFAULTS)
    return KernelCall(_normed_label(call, label), Workload("linear", args), [*inputs, *ordered, *rest])


def _norms(call) -> dict:
    """The norms that a linear layer's kernel computes, completes or prepares."""
    return {
        "eps": float(call.attrs["eps"]) if ops.normed(call) else None,
        "norm_in": float(call.attrs["norm_in"]) if ops.completes_norm(call) else None,
        "norm_out": ops.prepares_norm(call),
    }


def _normed_label(call, label: str) -> str:
    return f"rms_norm_{label}" if ops.normed(call) or ops.completes_norm(call) else label


def _head_linear(call) -> KernelCall:
    a = call.attrs
    args = {"fmt": str(a["formats"][0]), "heads": int(a["heads"])} | _sizes(call) | {"layout": str(a["layout"])}
    label = f"head_linear_{args['fmt']}_{args['heads']}x{args['n']}x{args['k']}_m{args['m']}"
    return KernelCall(label, Workload("head_linear", args))


def _gate_up(call) -> KernelCall:
    a = call.attrs
    n, k, m = (int(a[key]) for key in ("n", "k", "m"))
    gate, up = (str(f) for f in a["formats"])
    label = f"gate_up_{'_'.join(dict.fromkeys((gate, up)))}_{n}x{k}_m{m}"
    args = {"gate": gate, "up": up, "n": n, "k": k, "m": m}
    args |= {"layout_in": str(a["layout_in"]), "layout": str(a["layout"])}
    args |= _differing({"act": str(a["act"])} | _norms(call), GATE_UP_DEFAULTS)
    return KernelCall(_normed_label(call, label), Workload("gate_up", args))


def _route(call) -> KernelCall:
    m, n = shape_of(call.args[1])
    routing = _routing(call)
    args = {"n": n, "m": m} | _experts(call) | routing
    inputs = call.args[: 2 + int(routing["bias"]) + int(routing["factors"])]  # the workspace is norm_route's
    return KernelCall(f"route_{args['experts']}_m{m}", Workload("route", args), inputs)


def _norm_route(call) -> KernelCall:
    a, k = call.attrs, shape_of(call.args[1])[1]
    args = {"fmt": str(a["format"]), "k": k, "eps": float(a["eps"]), "layout": str(a["layout"])}
    args |= {"both": ops.gives_both(call), "router_bias": bool(int(a["router_bias"]))}
    args |= _experts(call) | _routing(call)
    label = f"norm_route_{args['fmt']}_{args['experts']}x{k}_m1"
    return KernelCall(label, Workload("norm_route", args))


def _expert_order(call) -> KernelCall:
    args = {"m": shape_of(call.args[1])[0]} | _experts(call)
    return KernelCall(f"expert_order_{args['experts']}_m{args['m']}", Workload("expert_order", args))


def _gather(call) -> KernelCall:
    m, k = shape_of(call.args[1])
    args = {"k": k, "m": m} | _experts(call) | {"weighted": bool(int(call.attrs["weighted"]))}
    args |= {"layout": str(call.attrs["layout"])}
    return KernelCall(f"gather_{k}_m{m}", Workload("gather", args))


def _expert_gate_up(call) -> KernelCall:
    a = call.attrs
    gate, up = (str(f) for f in a["formats"])
    args = {"gate": gate, "up": up} | _sizes(call) | _experts(call)
    args |= {"biases": bool(int(a["biases"])), "act": str(a["act"])}
    args |= {"layout_in": str(a["layout_in"]), "layout": str(a["layout"])}
    # one row for all slots of a token, or a row for each
    args["shared"] = args["tile"] == 1 and ops.rows_of(call.args[1]) == args["m"]
    label = f"expert_gate_up_{'_'.join(dict.fromkeys((gate, up)))}_{_label_of(args)}"
    return KernelCall(label, Workload("expert_gate_up", args))


def _expert_linear(call) -> KernelCall:
    args = {"fmt": str(call.attrs["formats"][0])} | _sizes(call) | _experts(call)
    args |= {"bias": bool(int(call.attrs["biases"])), "layout": str(call.attrs["layout"])}
    label = f"expert_linear_{args['fmt']}_{_label_of(args)}"
    return KernelCall(label, Workload("expert_linear", args))


def _expert_down(call) -> KernelCall:
    a = call.attrs
    args = {"fmt": str(a["formats"][0])} | _sizes(call) | _experts(call)
    args |= {"bias": bool(int(a["biases"])), "weighted": bool(int(a["weighted"]))}
    args |= {"residual": bool(int(a["residual"])), "layout": str(a["layout"])}
    label = f"expert_down_{args['fmt']}_{_label_of(args)}"
    return KernelCall(label, Workload("expert_down", args))


def _combine(call) -> KernelCall:
    a, n = call.attrs, shape_of(call.args[1])[1]
    args = {"n": n, "m": int(a["m"])} | _experts(call)
    args |= {key: bool(int(a[key])) for key in ("weighted", "residual")}
    return KernelCall(f"combine_{n}_m{args['m']}", Workload("combine", args))


def _sample(call) -> KernelCall:
    m, columns = shape_of(call.args[1])
    args = {"vocab": int(call.attrs["vocab"]), "columns": columns, "m": m}
    return KernelCall(f"sample_{args['vocab']}_m{m}", Workload("sample", args))


def _rope_kv_write(call) -> KernelCall:
    writes, last = int(call.attrs["writes"]), len(call.args)
    m = shape_of(call.args[3 if writes else 2])[0]
    # of attention's attributes only the scale counts here, as queries are multiplied by it, and where keys go
    shape = {key: value for key, value in _attention_args(call).items() if key not in NOT_OF_ROPE}
    workload = Workload("rope_kv_write", shape | {"m": m} | _rope(call))
    caches = len(KV_TENSORS[str(call.attrs["kv"])])
    inplace = {1 + i: last - caches + i for i in range(caches)} if writes else None
    return KernelCall(f"rope_kv_write_m{m}", workload, inplace=inplace)


def _latent_kv_write(call) -> KernelCall:
    a, m, last = call.attrs, shape_of(call.args[3])[0], len(call.args)
    shape = {key: value for key, value in _attention_args(call).items() if key not in NOT_OF_ROPE}
    rope = {"neox": bool(int(a["neox"])), "rotary": int(a["rotary"]), "eps": float(a["eps"])}
    caches = len(LATENT_TENSORS)
    inplace = {1 + i: last - caches + i for i in range(caches)}
    return KernelCall(f"latent_kv_write_m{m}", Workload("latent_kv_write", shape | {"m": m} | rope), inplace=inplace)


def _rope_attention(call) -> KernelCall:
    m = shape_of(call.args[3])[0]
    args = _attention_args(call) | _rope(call) | {"layout": str(call.attrs["layout"])} | _differing({"m": m}, {"m": 1})
    return KernelCall(f"rope_attention{_window(call)}_m{m}", Workload("rope_attention", args))


def _attention(call) -> KernelCall:
    m, single = shape_of(call.args[3])[0], int(call.attrs["single"])
    args = _attention_args(call) | {"m": m, "single": single, "layout": str(call.attrs["layout"])}
    what = "attention_rows" if m == single else "attention_mixed" if single else "attention"
    return KernelCall(f"{what}{_window(call)}_m{m}", Workload("attention", args))


def _attention_args(call) -> dict[str, int | float | bool]:
    """The fields of schedules.attention.Attention; those with defaults only where they differ."""
    sizes = {key: int(call.attrs[key]) for key in ("heads", "kv_heads", "d", "ctx")}
    variant = {key: type(default)(call.attrs[key]) for key, default in ATTENTION_DEFAULTS.items()}
    return sizes | _differing(variant, ATTENTION_DEFAULTS)


def _rope(call) -> dict:
    """The fields of schedules.attention.Rope, likewise."""
    a = call.attrs
    eps = float(a["eps"]) if int(a["head_norm"]) else None
    variant = {key: bool(int(a[key])) for key in ROPE_DEFAULTS}
    return {"neox": bool(int(a["neox"])), "rotary": int(a["rotary"]), "eps": eps} | _differing(variant, ROPE_DEFAULTS)


def _causal_conv(call) -> KernelCall:
    a, m = call.attrs, shape_of(call.args[1])[0]
    args = {key: int(a[key]) for key in ("channels", "taps", "single")} | {"m": m, "gated": bool(int(a["gated"]))}
    args |= {"act": str(a["act"]), "bias": bool(int(a["bias"]))} | _differing({"parts": int(a["parts"])}, {"parts": 1})
    label = f"causal_conv{_kind(args)}_{args['channels']}x{args['taps']}_m{m}"
    return KernelCall(label, Workload("causal_conv", args), inplace={1: len(call.args) - 1})


def _channel_decay(call) -> KernelCall:
    args = {key: int(call.attrs[key]) for key in ("heads", "d")} | {"m": shape_of(call.args[1])[0]}
    return KernelCall(f"channel_decay_{args['heads']}x{args['d']}_m{args['m']}", Workload("channel_decay", args))


def _delta_net(call) -> KernelCall:
    a, m = call.attrs, shape_of(call.args[1])[0]
    args = {key: int(a[key]) for key in ("key_heads", "value_heads", "d", "single")} | {"m": m}
    args |= {"grouped": bool(int(a["grouped"])), "eps": float(a["eps"])}
    args |= _differing({"by_channel": bool(int(a["by_channel"]))}, {"by_channel": False})
    label = f"delta_net{_kind(args)}_{args['key_heads']}x{args['value_heads']}x{args['d']}_m{m}"
    return KernelCall(label, Workload("delta_net", args), inplace={1: len(call.args) - 1})


def _ssm_scan(call) -> KernelCall:
    a, m = call.attrs, shape_of(call.args[1])[0]
    args = {key: int(a[key]) for key in ("heads", "d", "size", "groups", "single")} | {"m": m}
    label = f"ssm_scan{_kind(args)}_{args['heads']}x{args['d']}x{args['size']}_m{m}"
    return KernelCall(label, Workload("ssm_scan", args), inplace={1: len(call.args) - 1})


def _gate(call) -> KernelCall:
    a, (m, k) = call.attrs, shape_of(call.args[1])
    args = {"k": k, "m": m, "size": int(a["size"]), "eps": float(a["eps"]) if int(a["normed"]) else None}
    args |= {"silu": bool(int(a["silu"])), "layout": str(a["layout"])}
    what = ("_norm" if int(a["normed"]) else "") + ("_quantize" if args["layout"] else "")
    return KernelCall(f"gate{what}_{k}_m{m}", Workload("gate", args))


def _kind(args: dict) -> str:
    """Which rows of a step may be single ones, in a label."""
    return "_rows" if args["single"] == args["m"] else "_mixed" if args["single"] else ""


def _experts(call) -> dict[str, int]:
    return {key: int(call.attrs[key]) for key in ops.EXPERTS}


def _routing(call) -> dict[str, str | float | bool | int]:
    a = call.attrs
    flags = {key: bool(int(a[key])) for key in ("normalize", "bias", "factors")}
    groups = {key: int(a[key]) for key in ("groups", "groups_used")}
    return {"gating": str(a["gating"]), "scale": float(a["scale"])} | flags | groups


def _sizes(call) -> dict[str, int]:
    return {key: int(call.attrs[key]) for key in ("n", "k", "m")}


def _label_of(args: dict) -> str:
    return f"{args['experts']}x{args['n']}x{args['k']}_m{args['m']}"


def _window(call) -> str:
    return "".join(f"_{key}{size}" for key in ("window", "chunk") if (size := int(call.attrs[key])))


def _differing(args: dict, defaults: dict) -> dict:
    """Arguments that are not the default: a workload names only those, so its identity outlives new attributes."""
    return {key: value for key, value in args.items() if value != defaults[key]}


MAKERS: dict[str, Callable[[Any], KernelCall]] = {
    "embed": _embed,
    "rms_norm": _rms_norm,
    "layer_norm": _layer_norm,
    "quantize": _quantize,
    "linear": _linear,
    "head_linear": _head_linear,
    "gate_up": _gate_up,
    "route": _route,
    "norm_route": _norm_route,
    "expert_order": _expert_order,
    "gather": _gather,
    "expert_gate_up": _expert_gate_up,
    "expert_linear": _expert_linear,
    "expert_down": _expert_down,
    "combine": _combine,
    "rope_kv_write": _rope_kv_write,
    "latent_kv_write": _latent_kv_write,
    "rope_attention": _rope_attention,
    "attention": _attention,
    "causal_conv": _causal_conv,
    "gate": _gate,
    "channel_decay": _channel_decay,
    "delta_net": _delta_net,
    "ssm_scan": _ssm_scan,
    "sample": _sample,
}
