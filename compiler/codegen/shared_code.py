"""Compiles kernels that differ only in their number of workgroups once, for the largest of them.

In: kernels by name. Out: for each kernel the one whose code it launches (`representatives`), and the launches of a call
(`relaunched`).

Most kernels compute one row of the step in a workgroup. So the kernels for 8 and for 64 rows are equal except for the
grid and the first extent of buffers, on which no address depends. Code for a larger grid assumes less about the number
of a workgroup, so it is also valid for a smaller grid.
"""

from dataclasses import replace
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx

from mlc_amd.compiler import nodes
from mlc_amd.compiler.codegen.lower import AXES, Function, has_blocks, walk

Grid = tuple[int, int, int]
_ANY = tirx.const(0, "int32")  # stands for an extent that may differ


def grids(kernel: tirx.PrimFunc) -> list[Grid]:
    """The grids of a kernel's launches, in order."""
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
    """{kernel: the kernel whose code it launches}; most kernels have their own code."""
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
    """The launches of a call of `kernel`, which uses the code of `function`."""
    launches = zip(function.launches, grids(kernel), strict=True)
    return replace(function, launches=tuple(replace(launch, grid=grid) for launch, grid in launches))


def _within(grids_of_one: list[Grid], grids_of_other: list[Grid]) -> bool:
    pairs = zip(grids_of_one, grids_of_other, strict=True)
    return all(size <= other for pair in pairs for size, other in zip(*pair, strict=True))


def _code(kernel: tirx.PrimFunc) -> tvm.ir.BaseFunc:
    """The kernel without the parts in which it may differ from its representative: name, grid, first extents."""
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
