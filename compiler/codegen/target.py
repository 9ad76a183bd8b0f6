"""What the graph passes, the plan and the pipeline ask of a target, and how operators become kernels; targets fill in
the rest.

A call of an operator becomes a workload (operator, sizes, formats, attributes), and a workload and an arch become a
TensorIR kernel, by the target's table of `builders`. Calls with the same attributes and types share one. `plans` says
which plan a workload has on an arch.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any

import tvm
from tvm import relax

from mlc_amd.compiler import ops
from mlc_amd.compiler.codegen import generic
from mlc_amd.compiler.models.config import AttentionConfig, ExpertsConfig, LayerConfig, ModelConfig
from mlc_amd.compiler.nodes import fields_of, parts_of
from mlc_amd.compiler.ops import shape_of
from mlc_amd.compiler.work import buffers, work
from mlc_amd.schedules import operators
from mlc_amd.schedules.attention import Attention, Rope, ring_of
from mlc_amd.schedules.plans.workload import Workload

# What kernels' builders take for arguments that a workload does not name.
ATTENTION_DEFAULTS = {f.name: f.default for f in fields(Attention) if f.default is not MISSING}
ROPE_DEFAULTS = {f.name: f.default for f in fields(Rope) if isinstance(f.default, bool)}
EMBED_DEFAULTS, GATE_UP_DEFAULTS, NORM_DEFAULTS = {"scale": 1.0}, {"act": "silu"}, {"both": False}
NOT_OF_ROPE = ("window", "chunk", "softcap", "sinks")
DEFAULT = "default"  # where a plan comes from that nobody tuned
GENERIC = "generic"  # the operator of kernels that no operator of ours has


class Target(ABC):
    """Layouts, kernels and code of one target.

    archs: what the artifact's kernels are made for. They share its launches, weights and activations, so layouts are
    those of the first one. plans: by an arch's name, callable(workload) -> (plan or None, where it comes from).
    """

    kind: str  # as in --target
    query_dtype = "float32"  # of rotated queries, between RoPE and attention
    layout: str  # of packed weights, as in compiler/quant
    builders: Mapping[str, Callable]  # by operator, such as schedules/cpu/kernels.py has them

    def __init__(self, archs: list):
        self.archs = archs
        self.kernels: dict[str, tvm.tirx.PrimFunc] = {}  # name: kernel, for the first arch
        self.workloads: dict[str, Workload] = {}  # name: what the kernel computes, of operators of ours
        self.generic: dict[str, tvm.tirx.PrimFunc] = {}  # name: what the kernel computes, unscheduled, of all others
        self.plans: dict[str, Callable[[Workload], tuple[Any | None, str]]] = {}
        self._names: dict[tuple, str] = {}  # (operator, attributes, types): name

    # ---- what a target decides

    @staticmethod
    @abstractmethod
    def planes(fmt: str, n: int, k: int) -> dict[str, tuple[tuple[int, ...], str]]:
        """Plane name to (shape, dtype) of a packed n x k weight, in the order in which kernels take them."""

    @abstractmethod
    def prefill_sizes(self, ctx: int) -> list[int]:
        """Tokens of the prefill functions."""

    def score_size(self, ctx: int) -> int:
        """Tokens of the function that gives the logits of every position."""
        return 64

    @abstractmethod
    def act_layout(self, m: int, kind: str) -> str:
        """Layout (ops.LAYOUTS) in which linears take m tokens' activations for weights of that kind ("int8",
        "float"); "": float32."""

    def layer(self, attention: AttentionConfig, ctx: int) -> Attention:
        """What the kernels of a layer with that attention compute, at a capacity of `ctx` tokens."""
        a, rows = attention, max(*self.prefill_sizes(ctx), self.score_size(ctx))
        chunk = a.chunk if a.chunk < ctx else 0
        ring = ring_of(a.window or chunk, rows, ctx)
        return Attention(a.heads, a.kv_heads, a.head_dim, ctx, a.scale, a.window, a.softcap, a.sinks, chunk, ring)

    def rings(self, config: ModelConfig, ctx: int) -> set[tuple[int, int]]:
        """(places of its cache, keys that a row sees at most) of the layers that keep fewer than ctx keys."""
        layers = [self.layer(layer.attention, ctx) for layer in config.layers]
        return {(layer.ring, layer.span) for layer in layers if layer.ring}

    @abstractmethod
    def expert_tile(self, m: int) -> int:
        """Slots of a tile of one expert in a step of m rows: rows that its matrix products take at once. 1: the rows
        are few enough to be computed slot by slot, without sorting them."""

    @abstractmethod
    def cache_types(self, attention: AttentionConfig, ctx: int) -> dict[str, tuple[tuple[int, ...], str]]:
        """{"k": .., "v": ..}: (shape, dtype) of the cache of a layer with that attention."""

    def kv_types(self, config: ModelConfig, ctx: int) -> dict[str, tuple[tuple[int, ...], str]]:
        """Cache tensor name ("k.0", "v.0" ..) to (shape, dtype). Layers that attend to another one's have none."""
        return {
            f"{which}.{i}": of
            for i, layer in enumerate(config.layers)
            if layer.attention.kv_layer is None
            for which, of in self.cache_types(layer.attention, ctx).items()
        }

    fuses_rope = False  # decode attention rotates and writes the cache itself

    fuses_route = False  # one kernel makes the norm, the logits and the choice of a token's experts

    few = 1  # rows of a step, at most, for which attention and experts take the kernels of decode

    def attention_workspace(self, attention: AttentionConfig, ctx: int) -> dict[str, tuple[tuple[int, ...], str]]:
        """Further tensors that decode attention of that kind takes, for `few` rows at most, and that live as long as
        the cache: name to (shape, dtype). Zero at the start."""
        return {}

    def route_workspace(self, experts: ExpertsConfig) -> dict[str, tuple[tuple[int, ...], str]]:
        """The same of one token's choice among experts."""
        return {}

    def workspace(self, layer: LayerConfig, ctx: int) -> dict[str, tuple[tuple[int, ...], str]]:
        """All of a layer's."""
        found = self.attention_workspace(layer.attention, ctx)
        for part in (layer.feed_forward, layer.experts):
            found |= self.route_workspace(part) if isinstance(part, ExpertsConfig) else {}
        return found

    @property
    @abstractmethod
    def description(self) -> dict:
        """The manifest's `target`."""

    @abstractmethod
    def compile_kernels(self, mod: tvm.IRModule, directory: Path, progress, workers: int) -> dict:
        """Builds the module's kernels into `directory`; returns what the device needs to find them, as manifest
        entries."""

    @abstractmethod
    def compile_arch(
        self, arch, kernels: dict[str, tvm.tirx.PrimFunc], directory: Path, step=lambda name: None, workers: int = 1
    ) -> tuple[str, dict[str, dict]]:
        """Builds kernels for one of `archs`: the file in `directory`, and what a call of each launches, {kernel:
        {"scratch": [bytes], "steps": [launch]}}, see dist/README.md. step(name): called when a kernel is done."""

    # ---- operators to kernels

    def select_kernels(self, mod: tvm.IRModule) -> tvm.IRModule:
        """Replaces every operator of ours by a call of its kernel; standard operators that no pass fused are fused with
        one another and get generic kernels. UserError for an operator that has none."""
        makers = {ops.PREFIX + name: getattr(self, "_" + name) for name in ops.OPS}
        with tvm.target.Target("llvm"):
            mod = relax.transform.LegalizeOps(makers)(mod)
        mod, found = generic.fuse(mod, self.kernels)
        self.generic |= found
        scheduled = {name: generic.scheduled(name, func, self.archs[0]) for name, func in found.items()}
        self.kernels |= scheduled
        return generic.replaced(mod, scheduled)

    def plan(self, workload: Workload, arch) -> tuple[Any | None, str]:
        """(plan, where it comes from) of the workload's kernel on that arch; None: the kernel's default plan."""
        find = self.plans.get(arch.name)
        return find(workload) if find else (None, DEFAULT)

    def build(self, workload: Workload, arch, name: str, plan=None) -> tvm.tirx.PrimFunc:
        """The workload's kernel for an arch. Parameters are the operator's inputs, tuples flattened, then its outputs.
        ValueError or UserError for what the arch cannot run."""
        return self.builders[workload.op](**workload.args, arch=arch, name=name, plan=plan)

    def kernel(self, name: str, arch) -> tvm.tirx.PrimFunc:
        """The kernel of that name for an arch, with the plan that its workload has there."""
        if arch is self.archs[0]:
            return self.kernels[name]
        if name in self.generic:
            return generic.scheduled(name, self.generic[name], arch)
        workload = self.workloads[name]
        return self.build(workload, arch, name, self.plan(workload, arch)[0])

    def facts(self, name: str) -> dict:
        """What a kernel's entry in the manifest says of its operator: see dist/README.md. A generic kernel's bytes and
        operations are not counted."""
        found = buffers(self.kernels[name])
        if name in self.generic:
            roles = generic.roles(self.generic[name])
            params = [
                {"name": param, "shape": shape, "dtype": dtype, "role": role}
                for (param, shape, dtype), role in zip(found, roles, strict=True)
            ]
            return {"operator": GENERIC, "args": {}, "params": params, "states": []} | operators.FREE.manifest
        workload = self.workloads[name]
        made = work(workload, self.kernels[name])
        costs = operators.costs(workload.op, workload.args, operators.parameters(workload.op, workload.args, found))
        about = {"operator": workload.op, "args": workload.args, "params": made["params"], "states": made["states"]}
        return about | costs.manifest

    def origins(self, name: str) -> dict[str, dict]:
        """By arch, where a kernel's plan comes from, and the plan (None: the kernel's own)."""
        found = {}
        for arch in self.archs:
            plan, source = self.plan(self.workloads[name], arch) if name in self.workloads else (None, DEFAULT)
            found[arch.name] = {"from": source, "plan": None if plan is None else asdict(plan)}
        return found

    def _call(self, bb, call, label: str, workload: Workload, inplace: dict[int, int] | None = None, args=None):
        """A call of the workload's kernel: inputs (`args` where the kernel takes another order), flattened, then
        outputs. `inplace`: output index to input index."""
        inputs = [item for arg in (args or call.args) for item in _fields(bb, arg)]
        outputs = parts_of(call.ty)
        key = (str(call.op.name), str(call.attrs), tuple(str(arg.ty) for arg in call.args))
        if key not in self._names:
            name = label if label not in self.kernels else f"{label}_{len(self.kernels)}"
            self._names[key], self.workloads[name] = name, workload
            arch = self.archs[0]
            self.kernels[name] = self.build(workload, arch, name, self.plan(workload, arch)[0])
        name = self._names[key]
        gv = bb.add_func(self.kernels[name], name)
        if inplace:
            place = {
                j: next(i for i, item in enumerate(inputs) if item.same_as(call.args[arg]))
                for j, arg in inplace.items()
            }
            return relax.op.call_tir_inplace(
                gv, relax.Tuple(inputs), [place.get(j, -1) for j in range(len(outputs))], outputs
            )
        return relax.op.call_tir(gv, relax.Tuple(inputs), outputs if len(outputs) > 1 else outputs[0])

    def _embed(self, bb, call):
        a, m = call.attrs, shape_of(call.args[1])[0]
        args = {"fmt": str(a["format"]), "vocab": int(a["vocab"]), "k": int(a["k"]), "m": m}
        args |= _differing({"scale": float(a["scale"])}, EMBED_DEFAULTS)
        return self._call(bb, call, f"embed_{a['format']}_m{m}", Workload("embed", args))

    def _rms_norm(self, bb, call):
        return self._norm(bb, call, {})

    def _layer_norm(self, bb, call):
        return self._norm(bb, call, {"bias": bool(int(call.attrs["bias"]))})

    def _norm(self, bb, call, more: dict):
        a, (m, k), name = call.attrs, shape_of(call.args[1]), ops.name_of(call)
        layout, rows, both = str(a["layout"]), str(a["rows"]), ops.gives_both(call)
        args = {"k": k, "m": m, "eps": float(a["eps"])} | more | {"layout": layout, "rows": rows}
        args |= _differing({"both": both}, NORM_DEFAULTS)
        what = "_both" if both else "_quantize" if layout else ""
        return self._call(bb, call, f"{name}{what}_{k}_m{m}{'_last' if rows == 'last' else ''}", Workload(name, args))

    def _quantize(self, bb, call):
        m, k = shape_of(call.args[1])
        workload = Workload("quantize", {"k": k, "m": m, "layout": str(call.attrs["layout"])})
        return self._call(bb, call, f"quantize_{k}_m{m}", workload)

    def _linear(self, bb, call):
        a = call.attrs
        k, m, layout, residual = int(a["k"]), int(a["m"]), str(a["layout"]), bool(int(a["residual"]))
        segments = [(str(f), int(n)) for f, n in zip(a["formats"], a["n"], strict=True)]
        biases = [bool(int(b)) for b in a["biases"]]
        count = len(segments)
        # the operator takes weights, then biases; the kernel takes each bias after its weight
        state, x, weights, rest = call.args[0], call.args[1], call.args[2 : 2 + count], list(call.args[2 + count :])
        ordered = [
            value
            for weight, bias in zip(weights, biases, strict=True)
            for value in ([weight, rest.pop(0)] if bias else [weight])
        ]
        label = f"linear_{'_'.join(dict.fromkeys(f for f, _ in segments))}_{sum(n for _, n in segments)}x{k}_m{m}"
        args = {"segments": segments, "k": k, "m": m, "layout": layout, "biases": biases, "residual": residual}
        return self._call(bb, call, label, Workload("linear", args), args=[state, x, *ordered, *rest])

    def _gate_up(self, bb, call):
        a = call.attrs
        n, k, m = (int(a[key]) for key in ("n", "k", "m"))
        gate, up = (str(f) for f in a["formats"])
        label = f"gate_up_{'_'.join(dict.fromkeys((gate, up)))}_{n}x{k}_m{m}"
        args = {"gate": gate, "up": up, "n": n, "k": k, "m": m}
        args |= {"layout_in": str(a["layout_in"]), "layout": str(a["layout"])}
        args |= _differing({"act": str(a["act"])}, GATE_UP_DEFAULTS)
        return self._call(bb, call, label, Workload("gate_up", args))

    def _route(self, bb, call):
        m, n = shape_of(call.args[1])
        routing = _routing(call)
        args = {"n": n, "m": m} | _experts(call) | routing
        inputs = call.args[: 2 + int(routing["bias"]) + int(routing["factors"])]  # the workspace is norm_route's
        return self._call(bb, call, f"route_{args['experts']}_m{m}", Workload("route", args), args=inputs)

    def _norm_route(self, bb, call):
        a, k = call.attrs, shape_of(call.args[1])[1]
        args = {"fmt": str(a["format"]), "k": k, "eps": float(a["eps"]), "layout": str(a["layout"])}
        args |= {"both": ops.gives_both(call), "router_bias": bool(int(a["router_bias"]))}
        args |= _experts(call) | _routing(call)
        label = f"norm_route_{args['fmt']}_{args['experts']}x{k}_m1"
        return self._call(bb, call, label, Workload("norm_route", args))

    def _expert_order(self, bb, call):
        args = {"m": shape_of(call.args[1])[0]} | _experts(call)
        return self._call(bb, call, f"expert_order_{args['experts']}_m{args['m']}", Workload("expert_order", args))

    def _gather(self, bb, call):
        m, k = shape_of(call.args[1])
        args = {"k": k, "m": m} | _experts(call) | {"weighted": bool(int(call.attrs["weighted"]))}
        args |= {"layout": str(call.attrs["layout"])}
        return self._call(bb, call, f"gather_{k}_m{m}", Workload("gather", args))

    def _expert_gate_up(self, bb, call):
        a = call.attrs
        gate, up = (str(f) for f in a["formats"])
        args = {"gate": gate, "up": up} | _sizes(call) | _experts(call)
        args |= {"biases": bool(int(a["biases"])), "act": str(a["act"])}
        args |= {"layout_in": str(a["layout_in"]), "layout": str(a["layout"])}
        # one row for all slots of a token, or a row for each
        args["shared"] = args["tile"] == 1 and ops.rows_of(call.args[1]) == args["m"]
        label = f"expert_gate_up_{'_'.join(dict.fromkeys((gate, up)))}_{_label_of(args)}"
        return self._call(bb, call, label, Workload("expert_gate_up", args))

    def _expert_linear(self, bb, call):
        args = {"fmt": str(call.attrs["formats"][0])} | _sizes(call) | _experts(call)
        args |= {"bias": bool(int(call.attrs["biases"])), "layout": str(call.attrs["layout"])}
        label = f"expert_linear_{args['fmt']}_{_label_of(args)}"
        return self._call(bb, call, label, Workload("expert_linear", args))

    def _expert_down(self, bb, call):
        a = call.attrs
        args = {"fmt": str(a["formats"][0])} | _sizes(call) | _experts(call)
        args |= {"bias": bool(int(a["biases"])), "weighted": bool(int(a["weighted"]))}
        args |= {"residual": bool(int(a["residual"])), "layout": str(a["layout"])}
        label = f"expert_down_{args['fmt']}_{_label_of(args)}"
        return self._call(bb, call, label, Workload("expert_down", args))

    def _combine(self, bb, call):
        a, n = call.attrs, shape_of(call.args[1])[1]
        args = {"n": n, "m": int(a["m"])} | _experts(call)
        args |= {key: bool(int(a[key])) for key in ("weighted", "residual")}
        return self._call(bb, call, f"combine_{n}_m{args['m']}", Workload("combine", args))

    def _rope_kv_write(self, bb, call):
        m, last = shape_of(call.args[1])[0], len(call.args)
        # of attention's attributes only the scale counts here, as queries are multiplied by it, and where keys go
        shape = {key: value for key, value in self._attention_args(call).items() if key not in NOT_OF_ROPE}
        workload = Workload("rope_kv_write", shape | {"m": m} | self._rope(call))
        inplace = {1: last - 2, 2: last - 1} if int(call.attrs["writes"]) else None
        return self._call(bb, call, f"rope_kv_write_m{m}", workload, inplace)

    def _rope_attention(self, bb, call):
        args = self._attention_args(call) | self._rope(call) | {"layout": str(call.attrs["layout"])}
        return self._call(bb, call, f"rope_attention{_window(call)}_m1", Workload("rope_attention", args))

    def _attention(self, bb, call):
        m = shape_of(call.args[1])[0]
        args = self._attention_args(call) | {"m": m, "layout": str(call.attrs["layout"])}
        return self._call(bb, call, f"attention{_window(call)}_m{m}", Workload("attention", args))

    @staticmethod
    def _attention_args(call) -> dict[str, int | float | bool]:
        """The fields of schedules.attention.Attention; those with defaults only where they differ."""
        sizes = {key: int(call.attrs[key]) for key in ("heads", "kv_heads", "d", "ctx")}
        variant = {key: type(default)(call.attrs[key]) for key, default in ATTENTION_DEFAULTS.items()}
        return sizes | _differing(variant, ATTENTION_DEFAULTS)

    @staticmethod
    def _rope(call) -> dict:
        """The fields of schedules.attention.Rope, likewise."""
        a = call.attrs
        eps = float(a["eps"]) if int(a["head_norm"]) else None
        variant = {key: bool(int(a[key])) for key in ROPE_DEFAULTS}
        return {"neox": bool(int(a["neox"])), "rotary": int(a["rotary"]), "eps": eps} | _differing(
            variant, ROPE_DEFAULTS
        )


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


def _fields(bb, arg) -> list:
    """A tuple's fields as variables; anything else as it is."""
    if not isinstance(arg.ty, relax.TupleType):
        return [arg]
    return [bb.emit(relax.TupleGetItem(arg, i)) for i in range(len(fields_of(arg.ty)))]
