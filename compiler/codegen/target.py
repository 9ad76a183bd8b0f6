"""The base class of targets: what graph passes, plan and pipeline ask of a target, and how operators become kernels.
Subclasses (cpu.py, rocm_target.py, vulkan_target.py) fill in the rest.

In: an operator and an arch. Out: a TensorIR kernel, built by the target's `registry`. Calls with the same attributes
and types share one kernel. `plans` decides which plan a workload has on an arch.
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
# name: (module, class); modules are imported on demand
TARGETS = {
    "cpu": ("cpu", "CpuTarget"),
    "rocm": ("rocm_target", "RocmTarget"),
    "vulkan": ("vulkan_target", "VulkanTarget"),
}
GENERIC = "generic"  # the manifest's operator of generic kernels (generic.py)


class Target(ABC):
    """Layouts, kernels and code of one target.

    archs: the archs for which the artifact's kernels are compiled. They share launches, weights and activations, so
    layouts follow from the first arch. kv: type of the KV cache, a name of schedules/operators/attention.py. plans: by
    the arch's name, callable(workload) -> (plan or None, source of the plan).
    """

    kind: Literal["cpu", "rocm", "vulkan"]  # as in --target
    query_dtype = "float32"  # dtype of the queries after RoPE, the input of attention
    layout: str  # layout of packed weights, a name in compiler/quant
    registry: Registry  # builders of the target's kernels
    encoder_rows: tuple[int, ...]  # numbers of rows of encoders' steps

    def __init__(self, archs: list, kv: str = KV_TYPE):
        self.archs, self.kv = archs, kv
        self.kernels: dict[str, tvm.tirx.PrimFunc] = {}  # name: kernel, for the first arch
        self.workloads: dict[str, Operator] = {}  # name: the operator that the kernel computes
        self.generic: dict[str, tvm.tirx.PrimFunc] = {}  # name: the unscheduled PrimFunc of a generic kernel
        self.plans: dict[str, Callable[[Operator], tuple[Any | None, str]]] = {}
        self._names: dict[tuple, str] = {}  # (workload, types of arguments): name
        self._added: dict[str, tvm.ir.GlobalVar] = {}  # name: the kernel's variable in the module that is being built

    # ---- what a target decides

    @staticmethod
    @abstractmethod
    def planes(fmt: str, n: int, k: int) -> TensorTypes:
        """{plane: (shape, dtype)} of a packed weight of n rows and k columns, in the order of a kernel's parameters."""

    @abstractmethod
    def functions(self, ctx: int) -> list[FunctionSpec]:
        """The functions of a model for sequences of up to `ctx` tokens: "decode" with one row, and others with more."""

    def functions_of(self, config: ModelConfig, ctx: int, gpus: int = 1) -> list[FunctionSpec]:
        """The functions of a model. For a decoder: `functions`. For an encoder: functions of several sizes for the rows
        of whole texts, the largest with at least `ctx` rows. gpus: the number of GPUs that share the model by tensor;
        several GPUs compute the two halves of long chunks at the same time, so they also get functions for halves."""
        if not config.encoder:
            found = self.functions(ctx)
            return found if gpus == 1 else [*found, *_halves(found)]
        sizes = {*self.encoder_rows[:-1], max(self.encoder_rows[-1], ctx)}
        return [FunctionSpec(f"encode_{m}", m, 0, "all") for m in sorted(sizes)]

    @abstractmethod
    def act_layout(self, m: int, kind: str) -> str:
        """The layout (ops.LAYOUTS) in which linears take the activations of m tokens, for weights of `kind` ("int8" or
        "float"). "" stands for float32."""

    def expert_layout(self, m: int, formats: list[Format]) -> str:
        """Like `act_layout`, for linears of experts whose weights have these formats."""
        return self.act_layout(m, formats[0].kind)

    def head_layout(self, m: int, kind: str, k: int) -> str:
        """Like `act_layout`, for linears with one matrix of k columns for each head."""
        return self.act_layout(m, kind)

    def layer(self, attention: AttentionConfig, ctx: int) -> Attention:
        """The description of a layer's attention for kernels, at a capacity of `ctx` tokens."""
        a = attention
        window, chunk = (size if size < ctx else 0 for size in (a.window, a.chunk))
        shape = a.heads, a.kv_heads, a.columns, ctx
        values, scale = a.latent.rank if a.latent else 0, a.scale or (a.head_dim**-0.5 if a.alibi else 0.0)
        kv = KV_TYPE if chooses(a, ctx) else latent_type(self.kv) if values else self.kv
        return Attention(*shape, scale, window, a.softcap, a.sinks, chunk, kv, values)

    def spans(self, config: ModelConfig, ctx: int) -> dict[str, int]:
        """{cache tensor: span of its layer}. Tensors of the same span share pages. Tensors of states have STATE."""
        found = {i: self.layer(a, ctx) for i, a in _own_caches(config) if not config.encoder}
        spans = {f"{which}.{i}": layer.span for i, layer in found.items() for which in layer.cache}
        others = {**indexers(config, ctx), **compressed_caches(config, ctx)}
        return spans | dict.fromkeys(others, 0) | dict.fromkeys(self.state_types(config, ctx), STATE)

    @abstractmethod
    def expert_tile(self, m: int) -> int:
        """The number of slots in a tile of one expert, in a step of m rows: the rows that the expert's matrix products
        take together. 1: there are so few rows that slots are computed one by one, without sorting them by expert."""

    @abstractmethod
    def cache_types(self, attention: AttentionConfig, ctx: int) -> TensorTypes:
        """{"k": (shape, dtype), "v": ..}: the tensors of `Attention.cache` for a layer with this attention."""

    def kv_types(self, config: ModelConfig, ctx: int) -> TensorTypes:
        """{cache tensor: (shape, dtype)}. Tensors are named "k.0", "v.0" and so on, and as in `state_types`. Layers
        that attend to the keys of another layer have no tensors."""
        caches = {f"{which}.{i}": of for i, a in _own_caches(config) for which, of in self.cache_types(a, ctx).items()}
        caches |= {name: (op.cache_shape(), "float16") for name, op in indexers(config, ctx).items()}
        caches |= {name: (shape, "float16") for name, shape in compressed_caches(config, ctx).items()}
        return {} if config.encoder else caches | self.state_types(config, ctx)

    @staticmethod
    def state_types(config: ModelConfig, ctx: int) -> TensorTypes:
        """{name: (shape, dtype)} of the states of layers that keep one state for each sequence. Names are "conv.3" and
        so on; the first axis is the cell."""
        shapes = {
            f"{name}.{i}": shape
            for i, layer in enumerate(config.layers)
            if layer.recurrent
            for name, shape in layer.recurrent.states(config.hidden).items()
        }
        return {name: ((CELLS, *shape), "float32") for name, shape in (shapes | averages(config, ctx)).items()}

    fuses_rope = False  # decode attention applies RoPE and writes the cache itself
    fuses_route = False  # one kernel computes a token's norm, router logits and choice of experts

    def rotates_back(self, rotation: int) -> bool:
        """Whether attention of single rows multiplies its results by Hadamard matrices of size `rotation` itself."""
        return False

    def attends_in_blocks(self, chunk: bool) -> bool:
        """Whether attention kernels can write int8 blocks. chunk: the kernels for steps that contain a chunk."""
        return True

    def norm_place(self, before: Linear | AllReduce | None, readers: Sequence[Linear | GateUp]) -> NormPlace:
        """Where a norm of all rows is computed: "launch" by its own kernel, "computed" by its readers, "deferred"
        prepared by the kernel before and completed by its readers. before: the operator that computes the norm's input,
        if it is a linear of a single segment or an exchange (the sum); else None. readers: all operators that read the
        norm (compiler/passes/fuse_norms.py)."""
        return "launch"

    def joins(self, product: str, total: str) -> bool:
        """Whether a joint kernel exists that replaces the kernel `product` and the exchange kernel `total` after it."""
        return False

    def attention_workspace(self, attention: AttentionConfig, ctx: int, single: int) -> TensorTypes:
        """{name: (shape, dtype)} of further tensors that kernels of this attention take, for up to `single` single
        rows. They live as long as the cache, and are zero at the start."""
        return {}

    def route_workspace(self, experts: ExpertsConfig) -> TensorTypes:
        """Like `attention_workspace`, for the kernel that chooses the experts of one token."""
        return {}

    def workspace(self, layer: LayerConfig, ctx: int) -> TensorTypes:
        """The workspaces of a layer, for all functions: the largest tensor of each name."""
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
        """The value of `target` in the manifest."""

    @abstractmethod
    def compile_kernels(
        self, mod: tvm.IRModule, directory: Path, progress, workers: Workers, joint: Sequence[tuple[str, str]] = ()
    ) -> dict:
        """Compiles the module's kernels into `directory`. Returns the manifest's entries with which the device finds
        them. joint: pairs of kernels for which a joint kernel is compiled too (`joins`)."""

    @abstractmethod
    def compile_arch(
        self,
        arch,
        kernels: dict[str, tvm.tirx.PrimFunc],
        directory: Path,
        step=lambda name: None,
        workers: Workers = ALONE,
    ) -> tuple[str, dict[str, dict]]:
        """Compiles kernels for one of `archs`. Returns (name of the file in `directory`, {kernel: {"scratch": [bytes],
        "steps": [launch]}}), the launches of one call, see dist/README.md. step(name): called when a kernel is
        compiled."""

    # ---- operators to kernels

    def select_kernels(self, mod: tvm.IRModule) -> tvm.IRModule:
        """Replaces every operator of this project by a call of its kernel. Relax's own operators that no pass fused are
        fused with one another, and get generic kernels. Raises UserError for an operator without a kernel."""
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
        """(plan, source of the plan) of the workload's kernel on an arch. Plan None: the kernel's default plan."""
        find = self.plans.get(arch.name)
        return find(workload) if find else (None, DEFAULT)

    def build(self, workload: Operator, arch, name: str, plan=None) -> tvm.tirx.PrimFunc:
        """The workload's kernel for an arch. Its parameters are the operator's inputs, with tuples flattened, then the
        results. Raises ValueError or UserError for a kernel that the arch cannot run."""
        return self.registry.builders[type(workload)](workload, arch, name, plan)

    def kernel(self, name: str, arch) -> tvm.tirx.PrimFunc:
        """The kernel `name` for an arch, built with the plan of its workload on this arch."""
        if arch is self.archs[0]:
            return self.kernels[name]
        if name in self.generic:
            return generic.scheduled(name, self.generic[name], arch)
        workload = self.workloads[name]
        return self.build(workload, arch, name, self.plan(workload, arch)[0])

    def facts(self, name: str) -> dict:
        """The description of a kernel's operator in the manifest, see dist/README.md. Bytes and operations of generic
        kernels are not counted."""
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
        """{arch: {"from": source of the kernel's plan, "plan": the plan, None for the kernel's default}}."""
        found = {}
        for arch in self.archs:
            plan, source = self.plan(self.workloads[name], arch) if name in self.workloads else (None, DEFAULT)
            found[arch.name] = {"from": source, "plan": None if plan is None else asdict(plan)}
        return found

    def _call(self, bb, call):
        """The call of the operator's kernel. Arguments: inputs, with tuples flattened, then results."""
        op = ops.operator_of(call)
        assert op
        label, workload = op.label, op.workload
        inputs = [item for arg in call.args[: op.arguments] for item in _fields(bb, arg)]
        outputs = parts_of(call.ty)
        key = (workload, tuple(tvm_ffi.structural_hash(arg.ty) for arg in call.args))  # printing types is slow
        if key not in self._names:
            name = label if label not in self.kernels else f"{label}_{len(self.kernels)}"
            self._names[key], self.workloads[name] = name, workload
            arch = self.archs[0]
            self.kernels[name] = self.build(workload, arch, name, self.plan(workload, arch)[0])
        name = self._names[key]
        if name not in self._added:  # avoids the builder's slow search for an equal function
            self._added[name] = bb.add_func(self.kernels[name], name)
        gv = self._added[name]
        if written := op.written:
            places = [next(i for i, item in enumerate(inputs) if item.same_as(arg)) for arg in call.args[-written:]]
            inplace = [-1] * (len(outputs) - written) + places
            return relax.op.call_tir_inplace(gv, relax.Tuple(inputs), inplace, outputs)
        return relax.op.call_tir(gv, relax.Tuple(inputs), outputs if len(outputs) > 1 else outputs[0])


def _halves(functions: Sequence[FunctionSpec]) -> Iterator[FunctionSpec]:
    """Functions for half-length chunks, for the functions of the longest chunks that do not return all logits. Sizes
    that exist already are left out."""
    longest = max(spec.m for spec in functions)
    names = {spec.name for spec in functions}
    for spec in functions:
        half = longest // 2
        name = spec.name.replace(str(longest), str(half))
        if spec.m == longest and spec.single < half and name not in names and spec.answers != "all":
            yield replace(spec, name=name, m=half)


def _own_caches(config: ModelConfig) -> Iterator[tuple[int, AttentionConfig]]:
    """(number, attention) of the layers with their own keys and values."""
    return (
        (i, layer.attention)
        for i, layer in enumerate(config.layers)
        if layer.attention and layer.attention.kv_layer is None
    )


def _fields(bb, arg) -> list:
    """The fields of a tuple as variables. For anything else: a list of `arg` alone."""
    if not isinstance(arg.ty, relax.TupleType):
        return [arg]
    return [bb.emit(relax.TupleGetItem(arg, i)) for i in range(len(fields_of(arg.ty)))]


def make_target(target: str, arch: str, kv: str = KV_TYPE) -> Target:
    """The Target named `target` (a key of TARGETS). arch: as of --arch; kv: type of the KV cache. Raises UserError for
    unknown names."""
    if target not in TARGETS:
        raise UserError(f"unknown target '{target}'; known: {', '.join(TARGETS)}")
    if kv not in get_args(KvType):
        raise UserError(f"unknown type '{kv}' of the KV cache; known: {', '.join(get_args(KvType))}")
    module_name, class_name = TARGETS[target]
    return getattr(importlib.import_module(f"mlc_amd.compiler.codegen.{module_name}"), class_name)(arch, kv)
