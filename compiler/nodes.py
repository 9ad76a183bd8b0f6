"""Fields of TVM's nodes that its Python classes have without declaring them, for code that type checkers read."""

from typing import Any

import tvm


def functions(mod: tvm.IRModule) -> dict[tvm.ir.GlobalVar, Any]:
    """A module's functions, in its own order (which `functions_items` changes)."""
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
    """A tuple type's fields; the type itself, if it is none."""
    return list(fields_of(ty)) if isinstance(ty, tvm.relax.TupleType) else [ty]
