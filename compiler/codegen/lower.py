"""Lowers TensorIR kernels to device functions and their launches: the part that all GPU code generators share.

In: a PrimFunc with bound threads and static extents. Out: a `Function`, which lists the launches of a call, and the
lowered device functions by symbol. The passes are those of TVM's s_tir pipeline, up to the split into host and device
functions. The host function is only read (grids, scratch buffers, arguments of kernels).

Passes of TVM's pipeline that are left out:
- StorageRewrite: it makes LDS buffers of different types share memory through global addresses.
- CompactBufferAllocation, for kernels without blocks (all hand-written ones): it took most of the time, and only
  removed the padding after the last row of an LDS buffer.
- InjectPermutedLayout, InjectVirtualThread, RemoveNoOp, RenormalizeSplitPattern, the first of two StmtSimplify: they
  take long and change no kernel.
- HoistIfThenElse: it does not change LLVM's code, and it misread loads of fragments.
- the passes that the code generator names (`leave_out`).
"""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from typing import TypeVar

import tvm
import tvm.s_tir.pipeline  # registers the passes' options
import tvm_ffi
from tvm import s_tir, tirx

from mlc_amd.compiler import nodes

Result = TypeVar("Result")
AXES = "xyz"
LAUNCH_AXES = tuple(f"{kind}.{axis}" for kind in ("blockIdx", "threadIdx") for axis in AXES)


@dataclass(frozen=True)
class Launch:
    """One kernel launch. grid: workgroups; block: threads of a workgroup; both (x, y, z). args: for each argument of
    the kernel, in order, the index of the PrimFunc's parameter whose address it takes; len(parameters) + i stands for
    scratch buffer i."""

    symbol: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    args: tuple[int, ...]


@dataclass(frozen=True)
class Function:
    """The launches of a call of a PrimFunc, in order. scratch: bytes of each buffer that one of its kernels writes for
    a later one."""

    params: tuple[str, ...]
    scratch: tuple[int, ...]
    launches: tuple[Launch, ...]


def _passes():
    """TVM 0.27's s_tir pipeline (tvm/s_tir/pipeline.py) up to the split. Left out: optional passes, and those that the
    module's docstring lists."""
    t, x = s_tir.transform, tirx.transform
    return [
        t.CanonicalizeLoop(), t.LowerCrossThreadReduction(), t.LowerInitBlock(),
        t.PlanAndUpdateBufferAllocationLocation(), t.ConvertBlocksToOpaque(), t.LiftThreadBinding(),
        t.ManifestSharedMemoryLocalStage(), t.CompactBufferAllocation(), t.LowerAutoCopy(), t.UnifyThreadBinding(),
        t.LowerMatchBuffer(), t.AnnotateIrregularLoop(), t.InjectSoftwarePipeline(),
        t.TransformMmaBufferLayout(), t.LowerOpaqueBlock(), x.FlattenBuffer(), x.BF16ComputeLegalize(),
        x.NarrowDataType(32), t.LoopPartition(), x.VectorizeLoop(True), t.InjectDoubleBuffer(), x.UnrollLoop(),
        x.StmtSimplify(), t.RewriteUnsafeSelect(), x.CommonSubexprElim(), x.FP8ComputeLegalize(), x.VerifyMemory(),
        x.AnnotateEntryFunc(), t.ThreadSync("shared"), t.ThreadSync("shared.dyn"), t.ThreadSync("warp"),
        t.InferFragment(), t.LowerThreadAllreduce(), t.MergeSharedMemoryAllocations(), x.SplitHostDevice(),
    ]  # fmt: skip


def in_threads(work: Callable[[str], Result], names: Iterable[str], workers: int) -> list[Result]:
    """[work(name) for each name], on `workers` threads. After an error or Ctrl-C, no further work is started."""
    with ThreadPoolExecutor(workers) as pool:
        try:
            return list(pool.map(work, names))
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def lower(name: str, func: tirx.PrimFunc, arch, target, leave_out=()) -> tuple[Function, dict[str, tirx.PrimFunc]]:
    """The launches of `func`, and its device functions by symbol, not finalized yet.

    arch: a GpuArch or a Profile. leave_out: names of passes. Raises ValueError for a kernel that the arch cannot run
    (too many threads, too much LDS), and for extents that are not known at compile time.
    """
    module = tvm.IRModule({name: func.with_attr("global_symbol", name)})
    if not has_blocks(func):
        leave_out = (*leave_out, "s_tir.CompactBufferAllocation")
    passes = [step for step in _passes() if step.info.name not in leave_out]
    module = tvm.transform.Sequential([tirx.transform.BindTarget(target), *passes])(module)
    host, devices = None, {}
    for gv, f in module.functions.items():
        if "tirx.kernel_launch_params" in f.attrs:
            devices[gv.name_hint] = f
            check_lds(name, f, arch)
        else:
            host = f
    return read_host(name, host, arch), devices


def check_lds(name, device, arch):
    """Raises ValueError if the kernel's LDS buffers exceed the LDS limit of a workgroup on the arch."""
    found = []
    walk(device.body, tirx.AllocBuffer, lambda node: found.append(node.buffer))
    sizes = [bytes_of(buffer) for buffer in found if buffer.scope().startswith("shared")]
    if sum(sizes) > arch.lds:
        buffers = " + ".join(map(str, sizes))
        raise ValueError(
            f"kernel {name} needs {sum(sizes)} bytes of LDS (buffers of {buffers}), a workgroup of {arch.name} has "
            f"{arch.lds}"
        )


def read_host(name, host, arch) -> Function:
    """Reads the launches, scratch buffers and arguments from a lowered host function."""
    place = {param: i for i, param in enumerate(host.params)}
    scratch, launches, alias = [], [], {}

    def visit(node):
        if isinstance(node, tirx.AllocBuffer):
            place[node.buffer] = len(host.params) + len(scratch)
            scratch.append(bytes_of(node.buffer))
        elif isinstance(node, tirx.DeclBuffer):
            alias[node.buffer] = buffer_of(node.data)
        elif getattr(node.op, "name", "") == "tirx.call_ffi_kernel":
            launches.append(_launch(name, node, place, alias, arch.most_threads))

    walk(host.body, (tirx.AllocBuffer, tirx.DeclBuffer, tvm.ir.Call), visit)
    if not launches:
        raise ValueError(f"kernel {name} has no threads: bind its loops to blockIdx and threadIdx")
    return Function(tuple(param.name for param in host.params), tuple(scratch), tuple(launches))


def _launch(name, call, place, alias, threads) -> Launch:
    tags = [str(tag) for tag in call.attrs.launch_params]
    if unknown := set(tags) - set(LAUNCH_AXES):
        raise ValueError(
            f"kernel {name}: launch parameters {sorted(unknown)} are not supported (only shared memory of static size "
            "is)"
        )
    symbol, *rest = call.args
    values, extents = rest[: len(rest) - len(tags)], dict(zip(tags, rest[len(rest) - len(tags) :], strict=True))
    if dynamic := [tag for tag, extent in extents.items() if not isinstance(extent, tirx.IntImm)]:
        raise ValueError(f"kernel {name}: the extents of {dynamic} are not known at compile time")

    def sizes(kind: str) -> tuple[int, int, int]:
        x, y, z = (int(extents.get(f"{kind}.{axis}", 1)) for axis in AXES)
        return x, y, z

    grid, block = sizes("blockIdx"), sizes("threadIdx")
    if prod(block) > threads:
        raise ValueError(f"kernel {name} has workgroups of {prod(block)} threads; at most {threads} are possible")
    args = []
    for value in values:
        buffer = buffer_of(value)
        while buffer in alias and buffer not in place:
            buffer = alias[buffer]
        if buffer not in place:
            raise ValueError(f"kernel {name}: argument {value} is not a buffer; pass scalars in a buffer")
        args.append(place[buffer])
    return Launch(str(symbol.value), grid, block, tuple(args))


def walk(body, kinds, visit):
    """Calls visit(node) for every node of the classes `kinds` in a statement or an expression, outermost first."""
    tvm_ffi.structural_walk(body, (kinds, visit), order="pre")


def statements(func: tirx.PrimFunc) -> int:
    """The number of statements that compute. The time of code generators grows with it."""
    found = []
    walk(nodes.body(func), (tirx.BufferStore, tirx.Bind), found.append)
    return len(found)


def has_blocks(func: tirx.PrimFunc) -> bool:
    """Whether the kernel consists of blocks (SBlock), like the kernels that TVM itself generates."""
    found = []
    walk(nodes.body(func), s_tir.SBlock, found.append)
    return bool(found)


def bytes_of(buffer) -> int:
    """The bytes of a buffer of static shape."""
    dtype = tvm_ffi.dtype(str(buffer.dtype))
    return prod(int(extent) for extent in buffer.shape) * ((dtype.bits * dtype.lanes + 7) // 8)


def buffer_of(expr):
    """The buffer (a variable) whose address `expr` is; None for anything else."""
    if isinstance(expr, tvm.ir.Call) and getattr(expr.op, "name", "").endswith("buffer_data"):
        return expr.args[0]
    if isinstance(expr, tvm.ir.Var) and isinstance(expr.ty, (tvm.ir.PointerType, tirx.BufferType)):
        return expr
    return None
