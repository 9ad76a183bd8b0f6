"""What the graph passes, the plan and the pipeline ask of a target, and how operators become kernels; targets fill in
the rest.

One `make_<operator>` method a target turns attributes into a TensorIR kernel. Calls with the same attributes and types
share one. What is passed besides the name and the plan is the kernel's workload, which tuning knows it by; `plans` says
which plan a workload has on an arch.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import tvm
from tvm import relax

from mlc_amd.compiler import ops
from mlc_amd.compiler.ops import shape_of
from mlc_amd.schedules.plans.workload import Workload

DEFAULT = "default"  # where a plan comes from that nobody tuned


class Target(ABC):
    """Layouts, kernels and code of one target and arch.

    Subclasses also have make_embed, make_rms_norm, make_quantize, make_linear, make_gate_up_swiglu, make_rope_kv_write,
    make_attention, and make_rope_attention where `fuses_rope` is set; they take what the methods below pass, a kernel's
    name and a plan (None: its own), and return a PrimFunc: parameters are the operator's inputs, tuples flattened, then
    its outputs.

    plans: by an arch's name, callable(workload) -> (plan or None, where it comes from).
    """

    kind: str  # as in --target
    query_dtype = "float32"  # of rotated queries, between RoPE and attention
    layout: str  # of packed weights, as in compiler/quant

    def __init__(self):
        self.kernels: dict[str, tvm.tirx.PrimFunc] = {}  # name: kernel, for the first arch
        self.workloads: dict[str, Workload] = {}  # name: what the kernel computes
        self.plans: dict[str, Callable[[Workload], tuple[object | None, str]]] = {}
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
        """Layout (ops.ACT_LAYOUTS) in which linears take m tokens' activations for weights of that kind ("int8",
        "float"); "": float32."""

    @abstractmethod
    def kv_types(self, config, ctx: int) -> dict[str, tuple[tuple[int, ...], str]]:
        """Cache tensor name ("k.0", "v.0" ..) to (shape, dtype)."""

    fuses_rope = False  # decode attention rotates and writes the cache itself

    def attention_workspace(self, config, ctx: int) -> dict[str, tuple[tuple[int, ...], str]]:
        """Further tensors that decode attention takes and that live as long as the cache: name to (shape, dtype). Zero
        at the start."""
        return {}

    @property
    @abstractmethod
    def description(self) -> dict:
        """The manifest's `target`."""

    @abstractmethod
    def compile_kernels(self, mod: tvm.IRModule, directory: Path, progress, workers: int) -> dict:
        """Builds the module's kernels into `directory`; returns what the device needs to find them, as manifest
        entries."""

    # ---- operators to kernels

    def select_kernels(self, mod: tvm.IRModule) -> tvm.IRModule:
        """Replaces every operator of ours by a call of its kernel; standard operators that no pass fused get TVM's own
        kernels."""
        makers = {ops.PREFIX + name: getattr(self, "_" + name) for name in ops.OPS}
        with tvm.target.Target("llvm"):
            return relax.transform.LegalizeOps(makers)(mod)

    @property
    @abstractmethod
    def archs(self) -> list:
        """What the artifact's kernels are made for; `arch` is the one whose turn it is, at first the first."""

    def plan(self, workload: Workload, arch=None) -> tuple[object | None, str]:
        """(plan, where it comes from) of the workload's kernel on that arch, by default `arch`."""
        find = self.plans.get((arch or self.arch).name)
        return find(workload) if find else (None, DEFAULT)

    def make(self, workload: Workload, name: str) -> tvm.tirx.PrimFunc:
        """The workload's kernel for `arch`, with the plan that it has there."""
        return getattr(self, f"make_{workload.op}")(**workload.args, name=name, plan=self.plan(workload)[0])

    def origins(self, name: str) -> dict[str, dict]:
        """By arch, where a kernel's plan comes from, and the plan (None: the kernel's own)."""
        found = {}
        for arch in self.archs:
            plan, source = self.plan(self.workloads[name], arch) if name in self.workloads else (None, DEFAULT)
            found[arch.name] = {"from": source, "plan": None if plan is None else asdict(plan)}
        return found

    def _call(self, bb, call, label: str, workload: Workload, inplace: dict[int, int] | None = None, args=None):
        """A call of the workload's kernel: inputs (`args` where the kernel wants another order), flattened, then
        outputs. `inplace`: output index to input index."""
        inputs = [item for arg in (args or call.args) for item in _fields(bb, arg)]
        outputs = list(call.ty.fields) if isinstance(call.ty, relax.TupleType) else [call.ty]
        key = (str(call.op.name), str(call.attrs), tuple(str(arg.ty) for arg in call.args))
        if key not in self._names:
            name = label if label not in self.kernels else f"{label}_{len(self.kernels)}"
            self._names[key], self.workloads[name], self.kernels[name] = name, workload, self.make(workload, name)
        name = self._names[key]
        gv = bb.add_func(self.kernels[name], name)
        if inplace:
            place = {
                j: next(i for i, item in enumerate(inputs) if item.same_as(call.args[arg]))
                for j, arg in inplace.items()
            }
            return relax.op.call_tir_inplace(gv, inputs, [place.get(j, -1) for j in range(len(outputs))], outputs)
        return relax.op.call_tir(gv, inputs, outputs if len(outputs) > 1 else outputs[0])

    def _embed(self, bb, call):
        a, m = call.attrs, shape_of(call.args[1])[0]
        args = {"fmt": str(a["format"]), "vocab": int(a["vocab"]), "k": int(a["k"]), "m": m}
        return self._call(bb, call, f"embed_{a['format']}_m{m}", Workload("embed", args))

    def _rms_norm(self, bb, call):
        a, (m, k) = call.attrs, shape_of(call.args[1])
        act, row = str(a["act"]), str(a["row"])
        label = f"rms_norm{'_quantize' if act else ''}_{k}_m{m}{'_last' if row == 'last' else ''}"
        return self._call(
            bb, call, label, Workload("rms_norm", {"k": k, "m": m, "eps": float(a["eps"]), "act": act, "row": row})
        )

    def _quantize(self, bb, call):
        m, k = shape_of(call.args[1])
        return self._call(
            bb, call, f"quantize_{k}_m{m}", Workload("quantize", {"k": k, "m": m, "act": str(call.attrs["act"])})
        )

    def _linear(self, bb, call):
        a = call.attrs
        k, m, act, residual = int(a["k"]), int(a["m"]), str(a["act"]), bool(int(a["residual"]))
        segments = [(str(f), int(n)) for f, n in zip(a["formats"], a["n"], strict=True)]
        biases = [bool(int(b)) for b in a["biases"]]
        count = len(segments)
        # the operator takes weights, then biases; the kernel wants each bias behind its weight
        state, x, weights, rest = call.args[0], call.args[1], call.args[2 : 2 + count], list(call.args[2 + count :])
        ordered = [
            value
            for weight, bias in zip(weights, biases, strict=True)
            for value in ([weight, rest.pop(0)] if bias else [weight])
        ]
        label = f"linear_{'_'.join(dict.fromkeys(f for f, _ in segments))}_{sum(n for _, n in segments)}x{k}_m{m}"
        args = {"segments": segments, "k": k, "m": m, "act": act, "biases": biases, "residual": residual}
        return self._call(bb, call, label, Workload("linear", args), args=[state, x, *ordered, *rest])

    def _gate_up_swiglu(self, bb, call):
        a = call.attrs
        n, k, m = (int(a[key]) for key in ("n", "k", "m"))
        gate, up = (str(f) for f in a["formats"])
        label = f"gate_up_swiglu_{'_'.join(dict.fromkeys((gate, up)))}_{n}x{k}_m{m}"
        args = {"gate": gate, "up": up, "n": n, "k": k, "m": m, "act_in": str(a["act_in"]), "act_out": str(a["act"])}
        return self._call(bb, call, label, Workload("gate_up_swiglu", args))

    def _rope_kv_write(self, bb, call):
        m, last = shape_of(call.args[1])[0], len(call.args)
        workload = Workload("rope_kv_write", self._heads(call) | {"m": m} | self._rope(call))
        return self._call(bb, call, f"rope_kv_write_m{m}", workload, inplace={1: last - 2, 2: last - 1})

    def _rope_attention(self, bb, call):
        args = self._heads(call) | self._rope(call) | {"act": str(call.attrs["act"])}
        return self._call(bb, call, "rope_attention_m1", Workload("rope_attention", args))

    def _attention(self, bb, call):
        m = shape_of(call.args[1])[0]
        args = self._heads(call) | {"m": m, "act": str(call.attrs["act"])}
        return self._call(bb, call, f"attention_m{m}", Workload("attention", args))

    @staticmethod
    def _heads(call) -> dict[str, int]:
        return {key: int(call.attrs[key]) for key in ("heads", "kv_heads", "d", "ctx")}

    @staticmethod
    def _rope(call) -> dict:
        a = call.attrs
        return {
            "neox": bool(int(a["neox"])),
            "rotary": int(a["rotary"]),
            "eps": float(a["eps"]) if int(a["head_norm"]) else None,
        }


def _fields(bb, arg) -> list:
    """A tuple's fields as variables; anything else as it is."""
    if not isinstance(arg.ty, relax.TupleType):
        return [arg]
    return [bb.emit(relax.TupleGetItem(arg, i)) for i in range(len(arg.ty.fields))]
