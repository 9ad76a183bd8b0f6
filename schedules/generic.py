"""A simple, correct schedule for any function that has no kernel of this project: elementwise functions, functions that
move elements (broadcast, slices, concatenation, casts), and reductions.

In: a PrimFunc of blocks with static extents, as TVM's legalization and fusion produce it. Out: the PrimFunc with its
loops scheduled for an arch. Elementwise blocks are inlined into their users where possible. Each remaining block
becomes a loop nest, with scratch buffers between the nests: on a CPU it is parallel over rows, on a GPU it is a launch.

On a GPU each thread computes one element, or several if there are more elements than threads in a grid. A long
reduction with few results becomes two launches: the first computes LANES partial results for each result, the second
reduces them. No thread reads what another thread of the same launch wrote.
"""

from math import prod

import tvm
import tvm_ffi
from tvm import s_tir, tirx

# Functions that compiler/codegen/functions.py expands for CPUs, instead of calling the C library
EXPANDED = ("exp", "exp2", "log", "log2", "log10", "pow", "sigmoid", "tanh", "erf", "sin", "cos")
SERIAL = 1 << 14  # a CPU runs a loop nest with fewer steps on one thread
CHUNK = 1024  # columns of a task of a CPU thread, if there are few rows
VECTOR = 16  # elements of a CPU vector
GROUPS = 1 << 15  # largest number of workgroups of a launch; all drivers allow more
LANES = 64  # partial results for each result of a long reduction
MOST_PARTIAL = 1 << 18  # largest number of partial results of a launch


def schedule(func: tirx.PrimFunc, arch) -> tirx.PrimFunc:
    """Returns `func` scheduled for an arch: a CPU's Arch, a GpuArch or a Profile. Raises ValueError if it has no
    blocks, as a call of a library has none."""
    sch = s_tir.Schedule(func)
    try:
        root = sch.get_sblock("root")
    except s_tir.ScheduleError as error:
        raise ValueError(f"{func.attrs.get('global_symbol', 'a function')} has no blocks to schedule") from error
    _inline(sch, root)
    for block in sch.get_child_blocks(root):
        if arch.api == "cpu":
            _cpu(sch, block)
        else:
            _gpu(sch, block, arch.threads)
    # Simplified, because flattening an index like (i * 256 + j) % 256 // 64 * 48 would otherwise divide by zero.
    return (sch.mod if arch.api == "cpu" else tirx.transform.StmtSimplify()(sch.mod))["main"]


# ---- blocks


def _is_reduction(sch, block) -> bool:
    return any(var.iter_type != tirx.IterVar.DataPar for var in sch.get(block).iter_vars)


def _steps(sch, block) -> int:
    return prod(int(var.dom.extent) for var in sch.get(block).iter_vars)


def _inline(sch, root) -> None:
    """Inlines blocks into their users, unless a reduction would then compute the same element repeatedly. Users are
    visited before the blocks that they use, because inlining a user changes who uses the block."""
    for block in reversed(sch.get_child_blocks(root)):
        users = sch.get_consumers(block)
        again = any(_is_reduction(sch, user) and _steps(sch, user) > _steps(sch, block) for user in users)
        if users and not again and not _is_reduction(sch, block):
            try:
                sch.compute_inline(block)
            except s_tir.ScheduleError:  # it writes several buffers, or not each element once
                continue


def _loops(sch, block) -> tuple[list, list]:
    """(loops over results, at least one; loops over the reduced dimensions). Reorders the block's loops to this
    order."""
    over, reduced, loops, summed = [], [], sch.get_loops(block), []
    if loops:
        (realize,) = _realizations(sch, block, loops[0])
        for var, value in zip(realize.block.iter_vars, realize.iter_values, strict=True):
            if var.iter_type != tirx.IterVar.DataPar:
                tvm_ffi.structural_walk(value, (tvm.ir.Var, summed.append))
    for loop in loops:
        (reduced if any(sch.get(loop).loop_var.same_as(var) for var in summed) else over).append(loop)
    if not over:
        over = [sch.add_unit_loop(loops[0] if loops else block)]
    sch.reorder(*over, *reduced)
    return over, reduced


def _realizations(sch, block, loop) -> list:
    found, name = [], sch.get(block).name_hint

    def visit(node):
        if node.block.name_hint == name:
            found.append(node)

    tvm_ffi.structural_walk(sch.get(loop), (s_tir.SBlockRealize, visit))
    return found


# ---- CPU


def _cpu(sch, block) -> None:
    steps, (over, reduced) = _steps(sch, block), _loops(sch, block)
    *rows, last = over
    columns = int(sch.get(last).extent)
    parallel = steps >= SERIAL
    if parallel and (not rows or prod(int(sch.get(row).extent) for row in rows) < VECTOR) and columns > CHUNK:
        if reduced:  # each result takes many steps, so a task of a few results is large enough
            outer, last = sch.split(last, [None, VECTOR])
        else:
            outer, last = sch.split(last, [None, CHUNK])
        rows, columns = [*rows, outer], int(sch.get(last).extent)
    if parallel and rows:
        sch.parallel(sch.fuse(*rows) if len(rows) > 1 else rows[0])
    elif parallel and reduced:
        sch.parallel(last)
    if not reduced and columns % VECTOR == 0 and not _calls(sch, block):
        _, lanes = sch.split(last, [None, VECTOR])
        sch.vectorize(lanes)


def _calls(sch, block) -> bool:
    """Whether the block calls functions of EXPANDED. It is then not vectorized here: LLVM vectorizes their expansion
    itself."""
    found = []

    def visit(call) -> None:
        if getattr(call.op, "name", "").partition(".")[2] in EXPANDED:
            found.append(call)

    tvm_ffi.structural_walk(sch.get(block), (tvm.ir.Call, visit))
    return bool(found)


# ---- GPU


def _gpu(sch, block, threads: int) -> None:
    over, reduced = _loops(sch, block)
    if not reduced:
        _bind(sch, over, threads)
        return
    reduced = [sch.fuse(*reduced)] if len(reduced) > 1 else reduced
    results = prod(int(sch.get(loop).extent) for loop in over)
    if int(sch.get(reduced[0]).extent) >= 2 * LANES and results * LANES <= MOST_PARTIAL:
        _, lane = sch.split(reduced[0], [None, LANES])
        partial = sch.rfactor(lane, len(sch.get(block).writes[0].region))
        _reduce(sch, partial, threads)
    _reduce(sch, block, threads)


def _reduce(sch, block, threads: int) -> None:
    """Schedules a reduction: each thread computes a result, which it accumulates in registers."""
    over, reduced = _loops(sch, block)
    single = len(sch.get(block).writes) == 1
    stored = sch.cache_write(block, 0, "local") if single else None
    thread = _bind(sch, over, threads)
    if single:
        sch.reverse_compute_at(stored, thread)
    sch.decompose_reduction(block, reduced[0])


def _bind(sch, over, threads: int):
    """Binds loops over results to workgroups and threads. Returns the innermost loop over results."""
    loop = sch.fuse(*over) if len(over) > 1 else over[0]
    extent = int(sch.get(loop).extent)
    if extent > GROUPS * threads:
        again, group, thread = sch.split(loop, [None, GROUPS, threads])
        sch.reorder(group, thread, again)
        inner = again
    else:
        group, thread = sch.split(loop, [None, min(threads, extent)])
        inner = thread
    sch.bind(group, "blockIdx.x")
    sch.bind(thread, "threadIdx.x")
    return inner
