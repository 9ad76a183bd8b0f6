"""Operators from plain arguments, as tests write them, and their kernels."""

from dataclasses import fields
from typing import Any

from tvm import tirx

from mlc_amd.schedules.cpu import registry as on_cpu
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


def built(op: Operator, arch: Any, name: str = "kernel", plan: Any = None) -> tirx.PrimFunc:
    """The operator's kernel for an arch of any target."""
    registry = on_cpu if arch.api == "cpu" else on_gpu
    return registry.builders[type(op)](op, arch, name, plan)


def linear_op(segments, k, m, layout, biases=None, residual=False, **more) -> Linear:
    """Of segments [(format, n)]; without biases where there are none."""
    biases = (False,) * len(segments) if biases is None else tuple(biases)
    return Linear(segments=tuple(segments), k=k, m=m, layout=layout, biases=biases, residual=residual, **more)


def gate_up_op(gate, up, n, k, m, layout_in, layout, **more) -> GateUp:
    return GateUp(gate=gate, up=up, n=n, k=k, m=m, layout_in=layout_in, layout=layout, **more)
