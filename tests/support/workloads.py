"""Operators from plain arguments, as tests write them, and their kernels."""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from tvm import tirx

from mlc_amd.schedules.cpu import registry as on_cpu
from mlc_amd.schedules.cpu.base.arch import Arch
from mlc_amd.schedules.gpu import registry as on_gpu
from mlc_amd.schedules.operators import OPERATORS, GateUp, Linear, Operator, from_json
from mlc_amd.schedules.operators.attention import Attention, Rope

PARTS = {"layer": Attention, "rope": Rope}


def operator(name: str, args: dict[str, Any]) -> Operator:
    """args: attributes, by default of one row; those of Attention and Rope stand among the others."""
    own, args = {field.name for field in fields(OPERATORS[name])}, {"m": 1} | args
    for part, kind in PARTS.items():
        if part in own and part not in args:
            args[part] = {field.name: args.pop(field.name) for field in fields(kind) if field.name in args}
    return from_json({"op": name, "args": args})


def linear_op(
    segments: Sequence, k: int, m: int, layout: str, biases: Sequence | None = None, residual: bool = False, **more: Any
) -> Linear:
    """A linear layer, by default without biases; more: further attributes."""
    biases = (False,) * len(segments) if biases is None else tuple(biases)
    return Linear(segments=tuple(segments), k=k, m=m, layout=layout, biases=biases, residual=residual, **more)


def gate_up_op(gate: str, up: str, n: int, k: int, m: int, layout_in: str, layout: str, **more: Any) -> GateUp:
    return GateUp(gate=gate, up=up, n=n, k=k, m=m, layout_in=layout_in, layout=layout, **more)


def built(op: Operator, arch: Any, name: str = "kernel", plan: Any = None) -> tirx.PrimFunc:
    """The operator's kernel for an arch of any target."""
    registry = on_cpu if arch.api == "cpu" else on_gpu
    return registry.builders[type(op)](op, arch, name, plan)


def tiled(arch: Arch, p: int) -> Arch:
    """The CPU with activation tiles of p rows."""
    return replace(arch, isa=type(arch.isa.__name__, (arch.isa,), {"tokens": p}))
