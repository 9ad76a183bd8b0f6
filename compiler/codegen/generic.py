"""Generic kernels, for Relax operators without a hand-written kernel: TVM legalizes them, this module fuses them with
one another, and schedules/generic.py schedules them.

In: a module whose functions call hand-written kernels and PrimFuncs with blocks. Out: the same module, in which each
chain of the latter is one PrimFunc. Its name states the operations and the size: multiply_tanh_multiply_1024_m16.
"""

from itertools import chain, count
from math import prod
from typing import cast

import tvm
import tvm_ffi
from tvm import relax, tirx

from mlc_amd.compiler.nodes import body, functions, params
from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules import generic as schedules

OPAQUE = 8  # TVM's OpPatternKind: never fused
SYMBOL = "global_symbol"


def fuse(mod: tvm.IRModule, kernels: dict[str, tirx.PrimFunc]) -> tuple[tvm.IRModule, dict[str, tirx.PrimFunc]]:
    """Fuses all PrimFuncs of the module except `kernels`. Returns (the module, {name: fused PrimFunc, not scheduled
    yet}). New names differ from those in `kernels`."""
    parts = _primitive(mod) - kernels.keys()
    if not parts:
        return mod, {}
    for gv, func in list(functions(mod).items()):
        if gv.name_hint in kernels:
            mod.update_func(gv, func.with_attr("op_pattern", OPAQUE))
    passes = [
        relax.transform.AnnotateTIROpPattern(),
        relax.transform.FuseOps(),
        relax.transform.FuseTIR(),
        relax.transform.DeadCodeElimination(
            [gv.name_hint for gv, func in functions(mod).items() if isinstance(func, relax.Function)]
        ),
    ]
    mod = tvm.transform.Sequential(passes)(mod)
    found, names = {}, {}
    for old in sorted(_primitive(mod) - kernels.keys()):
        func = mod[old].without_attr("op_pattern") if "op_pattern" in mod[old].attrs else mod[old]
        label = _label(old, func, parts)
        numbered = chain([label], (f"{label}_{number}" for number in count(1)))
        new = next(name for name in numbered if name not in kernels and name not in found)
        names[old], found[new] = new, func.with_attr(SYMBOL, new)
    return _renamed(
        replaced(mod, {name: kernels[name] for name in _primitive(mod) & kernels.keys()}), names, found
    ), found


def scheduled(name: str, func: tirx.PrimFunc, arch) -> tirx.PrimFunc:
    """The generic kernel `name` for an arch. Raises UserError if there is no schedule for it."""
    try:
        made = schedules.schedule(func, arch).with_attr(SYMBOL, name)
        if arch.api != "cpu":  # TVM itself narrows only those indices to int32 that do not depend on data
            made = tirx.transform.ForceNarrowIndexToInt32()(tvm.IRModule({"main": made}))["main"]
        return cast(tirx.PrimFunc, made)
    except ValueError as error:
        raise UserError(f"no kernel for this model's operator {name}: {error}") from error


def replaced(mod: tvm.IRModule, functions: dict[str, tirx.PrimFunc]) -> tvm.IRModule:
    """The module with `functions` in place of its functions of the same names."""
    for name, func in functions.items():
        mod.update_func(mod.get_global_var(name), func)
    return mod


def _primitive(mod) -> set[str]:
    return {gv.name_hint for gv, func in functions(mod).items() if isinstance(func, tirx.PrimFunc)}


def _renamed(mod, names: dict[str, str], made_of: dict[str, tirx.PrimFunc]) -> tvm.IRModule:
    """The module with new names for functions. names: {old: new}. made_of: {new name: function}."""
    variables = {}
    made = tvm.IRModule({}, attrs=mod.attrs)
    for gv in functions(mod):
        if gv.name_hint in names:
            variables[gv] = tvm.ir.GlobalVar(names[gv.name_hint])
            relax.expr._update_type(variables[gv], gv.ty)
            made[variables[gv]] = made_of[names[gv.name_hint]]
    renamer = _Renamer(variables)
    for gv, func in functions(mod).items():
        if gv not in variables:
            made[gv] = renamer.visit_expr(func) if isinstance(func, relax.Function) else func
    return made


@relax.expr_functor.mutator
class _Renamer(relax.PyExprMutator):
    def __init__(self, variables):
        super().__init__()
        self.variables = variables

    def visit_global_var_(self, gv):
        return self.variables.get(gv, gv)


def roles(func: tirx.PrimFunc) -> list[str]:
    """ "input" or "output" for each parameter of a generic kernel."""
    stored = set()
    tvm_ffi.structural_walk(body(func), (tirx.BufferStore, lambda node: stored.add(node.buffer.name)), order="pre")
    return ["output" if param.name in stored else "input" for param in params(func)]


# ---- names


def _label(name: str, func: tirx.PrimFunc, parts: set[str]) -> str:
    """The new name of a fused function: fused_multiply_tir_tanh_multiply1 becomes the operations and the shape of its
    largest parameter. parts: the names before fusion; TVM appends numbers to the second and later use of a name."""
    words = []
    for word in name.removeprefix("fused_").split("_"):
        plain = word.rstrip("0123456789")
        if word not in ("tir", "te"):
            words.append(plain if plain in parts else word)
    largest = max(([int(n) for n in param.ty.shape] for param in params(func)), key=prod)
    if len(largest) < 2:
        return "_".join([*words, *map(str, largest)])
    return "_".join([*words, "x".join(map(str, largest[1:])), f"m{largest[0]}"])
