"""What the graph passes, the plan and the pipeline need of a target, and how operators become kernels; targets fill in
the rest.

An operator and an arch become a TensorIR kernel, by the target's `registry`. Calls with the same attributes
and types share one. `plans` says which plan a workload has on an arch.
"""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal, get_args

import tvm
import tvm_ffi
from tvm import relax

from mlc_amd.compiler import ops
from mlc_amd.compiler.codegen import generic
from mlc_amd.compiler.codegen.kernel_workers import ALONE, Workers
from mlc_amd.compiler.functions import FunctionSpec
from mlc_amd.compiler.models.config import AttentionConfig, ExpertsConfig, LayerConfig, ModelConfig
from mlc_amd.compiler.models.index_keys import averages, chooses, compressed_caches, indexers
from mlc_amd.compiler.nodes import fields_of, parts_of
from mlc_amd.compiler.work import buffers, work
from mlc_amd.runtime.artifact.manifest import ManifestTarget
from mlc_amd.runtime.cache.kv_types import KV_TYPE, KvType, latent_type
from mlc_amd.runtime.cache.pages import STATE
from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules import operators
from mlc_amd.schedules.formats import Format
from mlc_amd.schedules.operators import AllReduce, GateUp, Linear, NormPlace, Operator
from mlc_amd.schedules.operators.attention import Attention
from mlc_amd.schedules.registry import Registry
from mlc_amd.schedules.runs import CELLS

TensorTypes = dict[str, tuple[tuple[int, ...], str]]  # name: (shape, dtype)
DEFAULT = "default"  # the origin of a plan that was not tuned
# module and class, imported on demand
TARGETS = {
    "cpu": ("cpu", "CpuTarget"),
    "rocm": ("rocm_target", "RocmTarget"),
    "vulkan": ("vulkan_target", "VulkanTarget"),
}
GENERIC = "generic"  # the operator of kernels that no operator of ours has


class Target(ABC):
    """Layouts, kernels and code of one target.

    archs: what the artifact's kernels are made for. They share its launches, weights and activations, so layouts are
    those of the first one. kv: type of the KV cache, a name of schedules/operators/attention.py. plans: by an arch's
    name, callable(workload) -> (plan or None, where it comes from).
    """

    kind: Literal["cpu", "rocm", "vulkan"]  # as in --target
    query_dtype = "float32"  # of rotated queries, between RoPE and attention
    layout: str  # of packed weights, as in compiler/quant
    registry: Registry  # of its kernels
    encoder_rows: tuple[int, ...]  # of steps of encoders

    def __init__(self, archs: list, kv: str = KV_TYPE):
        self.archs, self.kv = archs, kv
        self.kernels: dict[str, tvm.tirx.PrimFunc] = {}  # name: kernel, for the first arch
        self.workloads: dict[str, Operator] = {}  # name: what the kernel computes, of operators of ours
        self.generic: dict[str, tvm.tirx.PrimFunc] = {}  # name: what the kernel computes, unscheduled, of all others
        self.plans: dict[str, Callable[[Operator], tuple[Any | None, str]]] = {}
        self._names: dict[tuple, str] = {}  # (workload, types of arguments): name
        self._added: dict[str, tvm.ir.GlobalVar] = {}  # name: the kernel in the module that is being made

    # ---- what a target decides

    @staticmethod
    @abstractmethod
    def planes(fmt: str, n: int, k: int) -> TensorTypes:
        """Plane name to (shape, dtype) of a packed n x k weight, in the order in which kernels take them."""

    @abstractmethod
    def functions(self, ctx: int) -> list[FunctionSpec]:
        """The functions of a model for sequences of up to `ctx` tokens: "decode" of one row, and those of more rows."""

    def functions_of(self, config: ModelConfig, ctx: int, gpus: int = 1) -> list[FunctionSpec]:
        """The functions of that model: `functions`, or an encoder's, which compute texts of up to `ctx` tokens each,
        the largest many at once. gpus: that share it by tensor: they compute halves of long chunks side by side."""
        if not config.encoder:
            found = self.functions(ctx)
            return found if gpus == 1 else [*found, *_halves(found)]
        sizes = {*self.encoder_rows[:-1], max(self.encoder_rows[-1], ctx)}
        return [FunctionSpec(f"encode_{m}", m, 0, "all") for m in sorted(sizes)]

    @abstractmethod
    def act_layout(self, m: int, kind: str) -> str:
        """Layout (ops.LAYOUTS) in which linears take m tokens' activations for weights of that kind ("int8",
        "float"); "": float32."""

    def expert_layout(self, m: int, formats: list[Format]) -> str:
        """The same for linears of experts, whose weights have these formats."""
        return self.act_layout(m, formats[0].kind)

    def head_layout(self, m: int, kind: str, k: int) -> str:
        """The same for linears with a matrix of k columns for each head."""
        return self.act_layout(m, kind)

    def layer(self, attention: AttentionConfig, ctx: int) -> Attention:
        """What the kernels of a layer with that attention compute, at a capacity of `ctx` tokens."""
        a = attention
        window, chunk = (size if size < ctx else 0 for size in (a.window, a.chunk))
        shape = a.heads, a.kv_heads, a.columns, ctx
        values, scale = a.latent.rank if a.latent else 0, a.scale or (a.head_dim**-0.5 if a.alibi else 0.0)
        kv = KV_TYPE if chooses(a, ctx) else latent_type(self.kv) if values else self.kv
        return Attention(*shape, scale, window, a.softcap, a.sinks, chunk, kv, values)

    def spans(self, config: ModelConfig, ctx: int) -> dict[str, int]:
        """Cache tensor to the span of its layer: those of the same span share pages. States have STATE."""
        found = {i: self.layer(a, ctx) for i, a in _own_caches(config) if not config.encoder}
        spans = {f"{which}.{i}": layer.span for i, layer in found.items() for which in layer.cache}
        others = {**indexers(config, ctx), **compressed_caches(config, ctx)}
        return spans | dict.fromkeys(others, 0) | dict.fromkeys(self.state_types(config, ctx), STATE)

    @abstractmethod
    def expert_tile(self, m: int) -> int:
        """Slots of a tile of one expert in a step of m rows: rows that its matrix products take at once. 1: the rows
        are few enough to be computed slot by slot, without sorting them."""

    @abstractmethod
    def cache_types(self, attention: AttentionConfig, ctx: int) -> TensorTypes:
        """{"k": .., "v": ..}: (shape, dtype) of the tensors of `Attention.cache`, of a layer with that attention."""

    def kv_types(self, config: ModelConfig, ctx: int) -> TensorTypes:
        """Cache tensor name ("k.0", "v.0" .., those of `state_types`) to (shape, dtype). Layers that attend to another
        one's have none."""
        caches = {f"{which}.{i}": of for i, a in _own_caches(config) for which, of in self.cache_types(a, ctx).items()}
        caches |= {name: (op.cache_shape(), "float16") for name, op in indexers(config, ctx).items()}
        caches |= {name: (shape, "float16") for name, shape in compressed_caches(config, ctx).items()}
        return {} if config.encoder else caches | self.state_types(config, ctx)

    @staticmethod
    def state_types(config: ModelConfig, ctx: int) -> TensorTypes:
        """The states of layers that keep one for each sequence, name to (shape, dtype): "conv.3" .., by cell."""
        shapes = {
            f"{name}.{i}": shape
            for i, layer in enumerate(config.layers)
            if layer.recurrent
            for name, shape in layer.recurrent.states(config.hidden).items()
        }
        return {name: ((CELLS, *shape), "float32") for name, shape in (shapes | averages(config, ctx)).items()}

    fuses_rope = False  # decode attention rotates and writes the cache itself
    fuses_route = False  # one kernel makes the norm, the logits and the choice of a token's experts

    def rotates_back(self, rotation: int) -> bool:
        """Whether attention of single rows multiplies its outputs by Hadamard matrices of that size itself."""
        return False

    def attends_in_blocks(self, chunk: bool) -> bool:
        """Whether kernels of attention produce int8 blocks; chunk: those of more than single rows."""
        return True

    def norm_place(self, before: Linear | AllReduce | None, readers: Sequence[Linear | GateUp]) -> NormPlace:
        """Where a norm of all rows is computed. before: the linear of a single segment that computes its input, or the
        exchange that adds it up, if it is one; readers: all that reads it (compiler/passes/fuse_norms.py)."""
        return "launch"

    def joins(self, product: str, total: str) -> bool:
        """Whether there is a kernel that computes one of that name, and exchanges its result as one of the other."""
        return False

    def attention_workspace(self, attention: AttentionConfig, ctx: int, single: int) -> TensorTypes:
        """Further tensors that attention of that kind takes for up to `single` single rows, and that live as long as
        the cache: name to (shape, dtype). Zero at the start."""
        return {}

    def route_workspace(self, experts: ExpertsConfig) -> TensorTypes:
        """The same of one token's choice among experts."""
        return {}

    def workspace(self, layer: LayerConfig, ctx: int) -> TensorTypes:
        """All of a layer's, in all functions: the largest of each name."""
        found: TensorTypes = {}
        for spec in self.functions(ctx):
            workspace = self.attention_workspace(layer.attention, ctx, spec.single) if layer.attention else {}
            for name, of in workspace.items():
                found[name] = max(found.get(name, of), of)
        for part in (layer.feed_forward, layer.experts):
            found |= self.route_workspace(part) if isinstance(part, ExpertsConfig) else {}
        return found

    @property
    @abstractmethod
    def description(self) -> ManifestTarget:
        """The manifest's `target`."""

    @abstractmethod
    def compile_kernels(
        self, mod: tvm.IRModule, directory: Path, progress, workers: Workers, joint: Sequence[tuple[str, str]] = ()
    ) -> dict:
        """Builds the module's kernels into `directory`; returns what the device needs to find them, as manifest
        entries. joint: pairs of kernels that become one launch, too (`joins`)."""

    @abstractmethod
    def compile_arch(
        self,
        arch,
        kernels: dict[str, tvm.tirx.PrimFunc],
        directory: Path,
        step=lambda name: None,
        workers: Workers = ALONE,
    ) -> tuple[str, dict[str, dict]]:
        """Builds kernels for one of `archs`: the file in `directory`, and what a call of each launches, {kernel:
        {"scratch": [bytes], "steps": [launch]}}, see dist/README.md. step(name): called when a kernel is done."""

    # ---- operators to kernels

    def select_kernels(self, mod: tvm.IRModule) -> tvm.IRModule:
        """Replaces every operator of ours by a call of its kernel; standard operators that no pass fused are fused with
        one another and get generic kernels. UserError for an operator that has none."""
        self._added = {}
        makers: dict[str, Any] = {ops.PREFIX + name: self._call for name in operators.OPERATORS}
        with tvm.target.Target("llvm"):
            mod = relax.transform.LegalizeOps(makers)(mod)
        mod, found = generic.fuse(mod, self.kernels)
        self.generic |= found
        scheduled = {name: generic.scheduled(name, func, self.archs[0]) for name, func in found.items()}
        self.kernels |= scheduled
        return generic.replaced(mod, scheduled)

    def plan(self, workload: Operator, arch) -> tuple[Any | None, str]:
        """(plan, where it comes from) of the workload's kernel on that arch; None: the kernel's default plan."""
        find = self.plans.get(arch.name)
        return find(workload) if find else (None, DEFAULT)

    def build(self, workload: Operator, arch, name: str, plan=None) -> tvm.tirx.PrimFunc:
        """The workload's kernel for an arch. Parameters are the operator's inputs, tuples flattened, then its outputs.
        ValueError or UserError for what the arch cannot run."""
        return self.registry.builders[type(workload)](workload, arch, name, plan)

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
        costs = operators.costs(workload, operators.parameters(workload, found))
        about = {"operator": workload.name, "args": workload.args, "params": made["params"], "states": made["states"]}
        return about | costs.manifest

    def origins(self, name: str) -> dict[str, dict]:
        """By arch, where a kernel's plan comes from, and the plan (None: the kernel's own)."""
        found = {}
        for arch in self.archs:
            plan, source = self.plan(self.workloads[name], arch) if name in self.workloads else (None, DEFAULT)
            found[arch.name] = {"from": source, "plan": None if plan is None else asdict(plan)}
        return found

    def _call(self, bb, call):
        """The call of the operator's kernel: inputs, flattened, then outputs."""
        op = ops.operator_of(call)
        assert op
        label, workload = op.label, op.workload
        inputs = [item for arg in call.args[: op.arguments] for item in _fields(bb, arg)]
        outputs = parts_of(call.ty)
        key = (workload, tuple(tvm_ffi.structural_hash(arg.ty) for arg in call.args))  # printing them takes long
        if key not in self._names:
            name = label if label not in self.kernels else f"{label}_{len(self.kernels)}"
            self._names[key], self.workloads[name] = name, workload
            arch = self.archs[0]
            self.kernels[name] = self.build(workload, arch, name, self.plan(workload, arch)[0])
        name = self._names[key]
        if name not in self._added:  # the builder would look for an equal one, which takes long
            self._added[name] = bb.add_func(self.kernels[name], name)
        gv = self._added[name]
        if written := op.written:
            places = [next(i for i, item in enumerate(inputs) if item.same_as(arg)) for arg in call.args[-written:]]
            inplace = [-1] * (len(outputs) - written) + places
            return relax.op.call_tir_inplace(gv, relax.Tuple(inputs), inplace, outputs)
        return relax.op.call_tir(gv, relax.Tuple(inputs), outputs if len(outputs) > 1 else outputs[0])


def _halves(functions: Sequence[FunctionSpec]) -> Iterator[FunctionSpec]:
    """Of the functions for the longest chunks."""
    longest = max(spec.m for spec in functions)
    names = {spec.name for spec in functions}
    for spec in functions:
        half = longest // 2
        name = spec.name.replace(str(longest), str(half))
        if spec.m == longest and spec.single < half and name not in names and spec.answers != "all":
            yield replace(spec, name=name, m=half)


def _own_caches(config: ModelConfig) -> Iterator[tuple[int, AttentionConfig]]:
    """The layers with keys and values of their own: number, attention."""
    return (
        (i, layer.attention)
        for i, layer in enumerate(config.layers)
        if layer.attention and layer.attention.kv_layer is None
    )


def _fields(bb, arg) -> list:
    """A tuple's fields as variables; anything else as it is."""
    if not isinstance(arg.ty, relax.TupleType):
        return [arg]
    return [bb.emit(relax.TupleGetItem(arg, i)) for i in range(len(fields_of(arg.ty)))]


def make_target(target: str, arch: str, kv: str = KV_TYPE) -> Target:
    """The Target of a name in TARGETS, for an arch as in --arch and a type of the KV cache. UserError for unknown
    ones."""
    if target not in TARGETS:
        raise UserError(f"unknown target '{target}'; known: {', '.join(TARGETS)}")
    if kv not in get_args(KvType):
        raise UserError(f"unknown type '{kv}' of the KV cache; known: {', '.join(get_args(KvType))}")
    module_name, class_name = TARGETS[target]
    return getattr(importlib.import_module(f"mlc_amd.compiler.codegen.{module_name}"), class_name)(arch, kv)
