"""Kernels that differ only in how many workgroups they launch: their code is made once, for the largest of them.

In: kernels by name. Out: for each the one whose code it launches (`representatives`), and what a call of it launches
(`relaunched`). Most kernels have a row of the step for each workgroup, and those of 8 and of 64 rows are equal but for
the grid and for the first extent of buffers, which no address depends on. Code for a larger grid assumes less of a
workgroup's number, so it serves a smaller one.
"""

from dataclasses import replace
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx

from mlc_amd.compiler import nodes
from mlc_amd.compiler.codegen.lower import AXES, Function, has_blocks, walk

Grid = tuple[int, int, int]
_ANY = tirx.const(0, "int32")  # an extent that does not count


def grids(kernel: tirx.PrimFunc) -> list[Grid]:
    """Of its launches, in order."""
    found: list[dict[str, int]] = []

    def visit(node) -> None:
        if node.attr_key == "thread_extent":
            kind, _, axis = node.node.thread_tag.partition(".")
            if kind == "blockIdx":
                if not found or axis in found[-1] or axis == "x":
                    found.append({})
                found[-1][axis] = int(node.value)

    walk(nodes.body(kernel), tirx.AttrStmt, visit)
    return [tuple(sizes.get(axis, 1) for axis in AXES) for sizes in found]  # type: ignore[misc]


def representatives(kernels: dict[str, tirx.PrimFunc]) -> dict[str, str]:
    """Of each kernel the one whose code it launches; most have their own."""
    found, groups = {}, {}
    sizes = {name: grids(kernel) for name, kernel in kernels.items()}
    for name in sorted(kernels, key=lambda name: (sizes[name], name), reverse=True):
        found[name] = name
        if has_blocks(kernels[name]):
            continue
        code = _code(kernels[name])
        others = groups.setdefault(tvm_ffi.structural_hash(code), [])
        for other, its_code in others:
            if _within(sizes[name], sizes[other]) and tvm_ffi.structural_equal(code, its_code):
                found[name] = other
                break
        else:
            others.append((name, code))
    return found


def relaunched(function: Function, kernel: tirx.PrimFunc) -> Function:
    """What a call of `kernel` launches, whose code is that of `function`."""
    launches = zip(function.launches, grids(kernel), strict=True)
    return replace(function, launches=tuple(replace(launch, grid=grid) for launch, grid in launches))


def _within(grids_of_one: list[Grid], grids_of_other: list[Grid]) -> bool:
    pairs = zip(grids_of_one, grids_of_other, strict=True)
    return all(size <= other for pair in pairs for size, other in zip(*pair, strict=True))


def _code(kernel: tirx.PrimFunc) -> tvm.ir.BaseFunc:
    """The kernel without what a representative need not have in common: its name, the grid, first extents."""
    places = {}

    def any_rows(buffer):
        shape = [_ANY, *list(buffer.shape)[1:]]
        places[buffer] = tirx.decl_buffer(shape, buffer.dtype, name=buffer.name, scope=buffer.scope())
        return places[buffer]

    def allocation(node, mutator):
        if node.buffer.scope() != "global":
            return mutator.default_mutate(node)
        return tirx.AllocBuffer(any_rows(node.buffer))

    def extent(node: Any, mutator):
        if node.attr_key != "thread_extent" or not node.node.thread_tag.startswith("blockIdx"):
            return mutator.default_mutate(node)
        no_range: Any = None
        axis = tirx.IterVar(no_range, node.node.var, node.node.iter_type, node.node.thread_tag)
        return tirx.AttrStmt(axis, node.attr_key, _ANY, mutator.mutate(node.body))

    params = [any_rows(param) for param in nodes.params(kernel)]
    callbacks = [
        (tirx.AllocBuffer, allocation), (tirx.AttrStmt, extent), (tirx.Var, lambda var, _: places.get(var, var)),
    ]  # fmt: skip
    body = tvm_ffi.structural_mutate(nodes.body(kernel), callbacks)
    return tirx.PrimFunc(params, body, attrs=kernel.attrs).with_attr("global_symbol", "")
