"""Kernels for Relax operators that have none by hand: legalized by TVM, fused with one another here, scheduled by
schedules/generic.py.

In: a module whose functions call kernels of ours and PrimFuncs of blocks. Out: the same with chains of the latter as
one PrimFunc each, under names that say what they compute and on what: multiply_tanh_multiply_1024_m16.
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
    """The module with its other PrimFuncs than `kernels` fused, and these by name, not scheduled yet. A name that is in
    `kernels` is taken."""
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
    """The generic kernel of that name for an arch. UserError where there is no schedule for it."""
    try:
        made = schedules.schedule(func, arch).with_attr(SYMBOL, name)
        if arch.api != "cpu":  # int32 for indices, which TVM lowers to int32 only where they depend on no data
            made = tirx.transform.ForceNarrowIndexToInt32()(tvm.IRModule({"main": made}))["main"]
        return cast(tirx.PrimFunc, made)
    except ValueError as error:
        raise UserError(f"no kernel for this model's operator {name}: {error}") from error


def replaced(mod: tvm.IRModule, functions: dict[str, tirx.PrimFunc]) -> tvm.IRModule:
    """The module with these functions in place of those of their names."""
    for name, func in functions.items():
        mod.update_func(mod.get_global_var(name), func)
    return mod


def _primitive(mod) -> set[str]:
    return {gv.name_hint for gv, func in functions(mod).items() if isinstance(func, tirx.PrimFunc)}


def _renamed(mod, names: dict[str, str], made_of: dict[str, tirx.PrimFunc]) -> tvm.IRModule:
    """The module with functions under new names (old: new)."""
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
    """Of fused_multiply_tir_tanh_multiply1 and its largest parameter. parts: names before fusion, of which TVM numbers
    the second and later ones."""
    words = []
    for word in name.removeprefix("fused_").split("_"):
        plain = word.rstrip("0123456789")
        if word not in ("tir", "te"):
            words.append(plain if plain in parts else word)
    largest = max(([int(n) for n in param.ty.shape] for param in params(func)), key=prod)
    if len(largest) < 2:
        return "_".join([*words, *map(str, largest)])
    return "_".join([*words, "x".join(map(str, largest[1:])), f"m{largest[0]}"])
