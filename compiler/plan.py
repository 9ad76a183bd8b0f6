"""Lowers a Relax module of kernel calls to the plan: for each function a flat list of launches, over one static arena.

In: a module whose functions consist of `call_tir` and `call_tir_inplace` only. Out, for each function, its launches in
order:

    {"kernel": name, "args": [argument, ..]}     an argument is one of
        ["io", name]                             state, tokens, logits and others
        ["weight", name]                         a tensor of the weights file
        ["kv", name]                             a cache tensor
        ["arena", offset, dtype, shape]          bytes of the arena from `offset` on

Relax's StaticPlanBlockMemory plans the memory: tensors that are not live at the same time share storage. All functions
of the decoder use the front of the arena. Functions that encode images use a part after it, because steps of the
decoder may run between the pieces of an encoder.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import tvm
from tvm import relax

from mlc_amd.compiler import nodes
from mlc_amd.runtime.artifact.io_names import OUTPUTS
from mlc_amd.runtime.artifact.manifest import ManifestLaunch, is_encoder
from mlc_amd.runtime.errors import UserError

Outputs = tuple[tuple[str, str], ...]
# An encoder's piece has PACE operations for each byte that a step of one token reads: a GPU computes 16 to 60 float16
# operations in the time in which it reads a byte. LEAST: lower limit of these bytes, as each submission takes time too.
PACE, LEAST = 32.0, 1 << 30
# joins(product, total): whether one kernel can replace the kernel `product` and the exchange `total` after it (names)
Joins = Callable[[str, str], bool]
ALIGN = 64  # alignment of every tensor in the arena, bytes: vector loads and TVM's argument checks need it


@dataclass(frozen=True)
class LaunchPlan:
    functions: dict[str, list[ManifestLaunch]]  # launches by function
    arena_bytes: int
    joint: list[tuple[str, str]]  # pairs of kernels that one launch may replace (`Joins`)

    def calls(self) -> dict[str, dict[str, int]]:
        """The number of calls of each kernel, by function: {kernel: {function: calls}}."""
        found: dict[str, Counter[str]] = {}
        for function, launches in self.functions.items():
            for launch in launches:
                found.setdefault(launch["kernel"], Counter())[function] += 1
        return {kernel: dict(counts) for kernel, counts in found.items()}


def lower(mod: tvm.IRModule, joins: Joins) -> tvm.IRModule:
    """The module with explicit allocations and one binding for each kernel call, memory planned."""
    passes = [
        relax.transform.DeadCodeElimination(),
        relax.transform.ToNonDataflow(),
        relax.transform.RemovePurityChecking(),
        relax.transform.CallTIRRewrite(),
    ]
    mod = tvm.transform.Sequential(passes)(mod)
    for gv, func in nodes.functions(mod).items():
        if isinstance(func, relax.Function):
            mod.update_func(gv, _allocated_first(func, joins))
    return relax.transform.StaticPlanBlockMemory()(mod)


def _allocated_first(func: relax.Function, joins: Joins) -> relax.Function:
    """Moves allocations before the first of two kernels that may be joined: then the second kernel's results share no
    memory with the first one's inputs."""
    body: Any = func.body
    found: list[Any] = []
    for binding in (one for block in body.blocks for one in block.bindings):
        name = _kernel(binding.value)
        before = next((i for i in reversed(range(len(found))) if _kernel(found[i].value)), None) if name else None
        if before is not None and joins(_kernel(found[before].value), name):
            between = found[before:]
            allocated = [one for one in between if _is_allocation(one.value)]
            found[before:] = allocated + [one for one in between if not _is_allocation(one.value)]
        found.append(binding)
    joined = relax.SeqExpr([relax.BindingBlock(found)], body.body)
    return relax.Function(func.params, joined, func.ret_ty, func.is_pure, func.attrs)


def _kernel(value) -> str:
    """The name of the kernel that `value` calls, or ""."""
    op = value.op if isinstance(value, relax.Call) else None
    return op.name_hint if isinstance(op, tvm.ir.GlobalVar) else ""


def _is_allocation(value) -> bool:
    return isinstance(value, relax.Call) and getattr(value.op, "name", "") == "relax.builtin.alloc_tensor"


def make_plan(
    mod: tvm.IRModule,
    parameters: dict[str, list],
    tensors: dict[str, list[str]],
    outputs: Mapping[str, Outputs] | None = None,
    joins: Joins = lambda product, total: False,
) -> LaunchPlan:
    """The plan of a module.

    parameters: (kind, name) of each parameter, by function. tensors: for each weight the names of its tensors in the
    weights file, one for each plane. outputs: (kind, name) of each returned tensor, by function; by default the first
    of OUTPUTS. Raises UserError for an operator without a kernel, ValueError for a constant tensor and for a returned
    tensor that no kernel wrote.
    """
    mod = lower(mod, joins)
    usual = tuple(("io", name) for name in OUTPUTS)
    functions, end = dict[str, list[ManifestLaunch]](), 0
    for names in ([n for n in parameters if not is_encoder(n)], [n for n in parameters if is_encoder(n)]):
        walkers = {
            n: _Walker(mod[n], parameters[n], tensors, outputs[n] if outputs else usual, begin=end) for n in names
        }
        functions |= {name: walker.launches for name, walker in walkers.items()}
        end = max((walker.arena for walker in walkers.values()), default=end)
    pairs = (pair for launches in functions.values() for pair in pairwise(launches))
    joint = [
        (a["kernel"], b["kernel"]) for a, b in pairs if joins(a["kernel"], b["kernel"]) and b["args"][1] in a["args"]
    ]
    return LaunchPlan(functions, end, sorted(set(joint)))


def pieces(
    launches: Sequence[ManifestLaunch], costs: Mapping[str, float], step: float
) -> list[Sequence[ManifestLaunch]]:
    """Divides the launches of a function that encodes images into pieces. A piece takes about as long as a step of one
    token; a launch that takes longer is a piece by itself. costs: operations of a call, by kernel. step: bytes that a
    step of one token reads."""
    cuts, filled, most = [0], 0.0, PACE * max(step, LEAST)
    for i, launch in enumerate(launches):
        cost = costs[launch["kernel"]]
        if filled and filled + cost > most:
            cuts.append(i)
            filled = 0.0
        filled += cost
    return [launches[first:end] for first, end in pairwise([*cuts, len(launches)])]


class _Walker:
    """Walks through one lowered function, binding by binding, and collects its launches. env: the argument (see the
    module) of each variable. begin: where the function's part of the arena begins, in bytes."""

    def __init__(self, func, parameters, tensors, outputs, begin):
        self.env: dict[Any, Any] = {}
        for var, (kind, name) in zip(func.params, parameters, strict=True):
            arguments = [[kind, part] for part in (tensors[name] if kind == "weight" else [name])]
            self.env[var] = arguments if isinstance(var.ty, relax.TupleType) else arguments[0]
        self.arena = begin
        self.launches: list[ManifestLaunch] = []
        for block in func.body.blocks:
            for binding in block.bindings:
                self.env[binding.var] = self.value(binding.value)
        self._name_outputs(self.value(func.body.body), outputs)

    def _name_outputs(self, returned, outputs) -> None:
        """Replaces the placeholders of returned tensors by their names, in all launches that have them as arguments."""
        returned = [returned] if isinstance(returned[0], str) else returned
        for argument, place in zip(returned, outputs, strict=False):
            if argument != ["io", None]:
                raise ValueError(f"the output {place[1]} is {argument}, not a tensor that a kernel wrote for it alone")
            argument[:] = place

    def value(self, value) -> Any:
        if isinstance(value, relax.Var):
            return self.env[value]
        if isinstance(value, relax.Tuple):
            return [self.value(field) for field in value.fields]
        if isinstance(value, relax.TupleGetItem):
            return self.value(value.tuple_value)[value.index]
        if isinstance(value, tvm.ir.GenericConst):
            raise ValueError(f"a constant {value.ty} cannot be part of a plan: make it a weight, or use single numbers")
        if isinstance(value.op, tvm.ir.GlobalVar):
            self.launches.append({"kernel": value.op.name_hint, "args": [self.value(arg) for arg in value.args]})
            return None
        return self.allocation(value)

    def allocation(self, call) -> Any:
        name = call.op.name
        if name == "relax.memory.alloc_storage":
            offset = self.arena
            self.arena += math.ceil(int(call.args[0].values[0]) / ALIGN) * ALIGN
            return ["storage", offset]
        if name == "relax.memory.alloc_tensor":
            storage, offset, shape, dtype, *_ = call.args
            return ["arena", self.env[storage][1] + int(offset.value), str(dtype.value), [int(s) for s in shape.values]]
        if name == "relax.builtin.alloc_tensor":  # a returned tensor: it is not in the arena
            return ["io", None]
        if name.startswith("relax.memory.kill"):
            return None
        raise UserError(f"this model needs {name}, for which there is no kernel")
