"""What the graph passes, the plan and the pipeline ask of a target, and how operators become kernels; targets fill in the rest.

One `make_<operator>` method a target turns attributes into a TensorIR kernel. Calls with the same attributes and types share one.
"""

from abc import ABC, abstractmethod
from pathlib import Path

import tvm
from tvm import relax

from mlc_amd.compiler import ops
from mlc_amd.compiler.ops import shape_of


class Target(ABC):
    """Layouts, kernels and code of one target and arch.

    Subclasses also have make_embed, make_rms_norm, make_quantize, make_linear, make_gate_up_swiglu, make_rope_kv_write, make_attention,
    and make_rope_attention where `fuses_rope` is set; they take what the methods below pass
    and return a PrimFunc: parameters are the operator's inputs, tuples flattened, then its outputs.
    """

    kind: str  # as in --target
    query_dtype = "float32"  # of rotated queries, between RoPE and attention
    layout: str  # of packed weights, as in compiler/quant

    def __init__(self):
        self.kernels: dict[str, tvm.tirx.PrimFunc] = {}  # name: kernel
        self._names: dict[tuple, str] = {}  # (operator, attributes, types): name

    # ---- what a target decides

    @staticmethod
    @abstractmethod
    def planes(fmt: str, n: int, k: int) -> dict[str, tuple[tuple[int, ...], str]]:
        """Plane name to (shape, dtype) of a packed n x k weight, in the order in which kernels take them."""

    @abstractmethod
    def prefill_sizes(self, ctx: int) -> list[int]:
        """Tokens of the prefill functions."""

    @abstractmethod
    def act_layout(self, m: int, kind: str) -> str:
        """Layout (ops.ACT_LAYOUTS) in which linears take m tokens' activations for weights of that kind ("int8", "float"); "": float32."""

    @abstractmethod
    def kv_types(self, config, ctx: int) -> dict[str, tuple[tuple[int, ...], str]]:
        """Cache tensor name ("k.0", "v.0" ..) to (shape, dtype)."""

    fuses_rope = False  # decode attention rotates and writes the cache itself

    def attention_workspace(self, config, ctx: int) -> dict[str, tuple[tuple[int, ...], str]]:
        """Further tensors that decode attention takes and that live as long as the cache: name to (shape, dtype). Zero at the start."""
        return {}

    @property
    @abstractmethod
    def description(self) -> dict:
        """The manifest's `target`."""

    @abstractmethod
    def compile_kernels(self, mod: tvm.IRModule, directory: Path, progress, workers: int) -> dict:
        """Builds the module's kernels into `directory`; returns what the device needs to find them, as manifest entries."""

    # ---- operators to kernels

    def select_kernels(self, mod: tvm.IRModule) -> tvm.IRModule:
        """Replaces every operator of ours by a call of its kernel; standard operators that no pass fused get TVM's own kernels."""
        makers = {ops.PREFIX + name: getattr(self, "_" + name) for name in ops.OPS}
        with tvm.target.Target("llvm"):
            return relax.transform.LegalizeOps(makers)(mod)

    def _call(self, bb, call, label: str, make, inplace: dict[int, int] | None = None, args=None):
        """A call of the kernel that `make(name)` gives: inputs (`args` where the kernel wants another order), flattened, then outputs.
        `inplace`: output index to input index."""
        inputs = [item for arg in (args or call.args) for item in _fields(bb, arg)]
        outputs = list(call.ty.fields) if isinstance(call.ty, relax.TupleType) else [call.ty]
        key = (str(call.op.name), str(call.attrs), tuple(str(arg.ty) for arg in call.args))
        if key not in self._names:
            name = label if label not in self.kernels else f"{label}_{len(self.kernels)}"
            self._names[key], self.kernels[name] = name, make(name)
        name = self._names[key]
        gv = bb.add_func(self.kernels[name], name)
        if inplace:
            place = {j: next(i for i, item in enumerate(inputs) if item.same_as(call.args[arg])) for j, arg in inplace.items()}
            return relax.op.call_tir_inplace(gv, inputs, [place.get(j, -1) for j in range(len(outputs))], outputs)
        return relax.op.call_tir(gv, inputs, outputs if len(outputs) > 1 else outputs[0])

    def _embed(self, bb, call):
        a, m = call.attrs, shape_of(call.args[1])[0]
        return self._call(
            bb, call, f"embed_{a['format']}_m{m}", lambda name: self.make_embed(str(a["format"]), int(a["vocab"]), int(a["k"]), m, name)
        )

    def _rms_norm(self, bb, call):
        a, (m, k) = call.attrs, shape_of(call.args[1])
        act, row = str(a["act"]), str(a["row"])
        label = f"rms_norm{'_quantize' if act else ''}_{k}_m{m}{'_last' if row == 'last' else ''}"
        return self._call(bb, call, label, lambda name: self.make_rms_norm(k, m, float(a["eps"]), act, row, name))

    def _quantize(self, bb, call):
        m, k = shape_of(call.args[1])
        return self._call(bb, call, f"quantize_{k}_m{m}", lambda name: self.make_quantize(k, m, str(call.attrs["act"]), name))

    def _linear(self, bb, call):
        a = call.attrs
        k, m, act, residual = int(a["k"]), int(a["m"]), str(a["act"]), bool(int(a["residual"]))
        segments = [(str(f), int(n)) for f, n in zip(a["formats"], a["n"], strict=True)]
        biases = tuple(bool(int(b)) for b in a["biases"])
        count = len(segments)
        # the operator takes weights, then biases; the kernel wants each bias behind its weight
        state, x, weights, rest = call.args[0], call.args[1], call.args[2 : 2 + count], list(call.args[2 + count :])
        ordered = [value for weight, bias in zip(weights, biases, strict=True) for value in ([weight, rest.pop(0)] if bias else [weight])]
        label = f"linear_{'_'.join(dict.fromkeys(f for f, _ in segments))}_{sum(n for _, n in segments)}x{k}_m{m}"
        make = lambda name: self.make_linear(segments, k, m, act, biases, residual, name)  # noqa: E731
        return self._call(bb, call, label, make, args=[state, x, *ordered, *rest])

    def _gate_up_swiglu(self, bb, call):
        a = call.attrs
        n, k, m = (int(a[key]) for key in ("n", "k", "m"))
        gate, up = (str(f) for f in a["formats"])
        label = f"gate_up_swiglu_{'_'.join(dict.fromkeys((gate, up)))}_{n}x{k}_m{m}"
        return self._call(
            bb, call, label, lambda name: self.make_gate_up_swiglu(gate, up, n, k, m, str(a["act_in"]), str(a["act"]), name)
        )

    def _rope_kv_write(self, bb, call):
        a, m, last = call.attrs, shape_of(call.args[1])[0], len(call.args)
        eps = float(a["eps"]) if int(a["head_norm"]) else None
        heads, kv_heads, d, ctx, rotary = (int(a[key]) for key in ("heads", "kv_heads", "d", "ctx", "rotary"))
        make = lambda name: self.make_rope_kv_write(heads, kv_heads, d, ctx, m, bool(int(a["neox"])), rotary, eps, name)  # noqa: E731
        return self._call(bb, call, f"rope_kv_write_m{m}", make, inplace={1: last - 2, 2: last - 1})

    def _rope_attention(self, bb, call):
        a = call.attrs
        eps = float(a["eps"]) if int(a["head_norm"]) else None
        heads, kv_heads, d, ctx, rotary = (int(a[key]) for key in ("heads", "kv_heads", "d", "ctx", "rotary"))
        make = lambda name: self.make_rope_attention(heads, kv_heads, d, ctx, bool(int(a["neox"])), rotary, eps, str(a["act"]), name)  # noqa: E731
        return self._call(bb, call, "rope_attention_m1", make)

    def _attention(self, bb, call):
        a, m = call.attrs, shape_of(call.args[1])[0]
        heads, kv_heads, d, ctx = (int(a[key]) for key in ("heads", "kv_heads", "d", "ctx"))
        return self._call(
            bb, call, f"attention_m{m}", lambda name: self.make_attention(heads, kv_heads, d, ctx, m, str(a["act"]), name)
        )


def _fields(bb, arg) -> list:
    """A tuple's fields as variables; anything else as it is."""
    if not isinstance(arg.ty, relax.TupleType):
        return [arg]
    return [bb.emit(relax.TupleGetItem(arg, i)) for i in range(len(arg.ty.fields))]
