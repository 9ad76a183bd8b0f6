"""Accessors for fields of TVM nodes that TVM's Python classes do not declare, for code that type checkers read."""

from typing import Any

import tvm


def functions(mod: tvm.IRModule) -> dict[tvm.ir.GlobalVar, Any]:
    """A module's functions, in the module's own order. (`functions_items` has another order.)"""
    fields: Any = mod
    return fields.functions


def body(func: tvm.tirx.PrimFunc) -> tvm.tirx.Stmt:
    fields: Any = func
    return fields.body


def params(func: tvm.tirx.PrimFunc) -> list[Any]:
    fields: Any = func
    return fields.params


def fields_of(ty: tvm.relax.TupleType) -> list[Any]:
    fields: Any = ty
    return fields.fields


def parts_of(ty) -> list[Any]:
    """The fields of a tuple type. For another type: a list of this type alone."""
    return list(fields_of(ty)) if isinstance(ty, tvm.relax.TupleType) else [ty]
