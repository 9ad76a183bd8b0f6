"""Compiles TensorIR kernels to SPIR-V compute shaders for Vulkan, without a shader compiler.

In: PrimFuncs with bound threads, and a `Profile` (schedules/gpu/base/profiles.py). Out: a `SpirvModule`: one SPIR-V
module for each launch, with the facts that the runtime needs, and the launches of each PrimFunc. `lower.py` lowers the
kernels; the modules of this package generate the code:

    emitter         a device function: statements, arguments, thread numbers; inherits from the parts below
    memory          addresses, loads, stores
    values          registers, packing, conversions
    expressions     operators
    intrinsics      calls: TIR's, LLVM's names, the externs "vk.*"
    subgroup        exchange of values between lanes
    matrix          cooperative matrices
    asm             writes SPIR-V instructions

Modules need Vulkan 1.2 or newer. Equal kernels produce equal bytes.
"""

import functools
from dataclasses import dataclass

import tvm
from tvm import tirx

from mlc_amd.compiler.codegen.functions import expand
from mlc_amd.compiler.codegen.lower import Function, lower
from mlc_amd.compiler.codegen.spirv.emitter import Emitter
from mlc_amd.compiler.codegen.spirv.types import Unsupported
from mlc_amd.schedules.gpu.base.profiles import Profile

COHERENT = "mlc_amd.coherent"  # attribute: names of the parameters through which workgroups of a launch exchange data
LEAVE_OUT = (
    "s_tir.LowerThreadAllreduce",  # subgroup.py does this
    # These two substitute bound values into the expressions that use them, which can become huge, and bind them again.
    "tirx.StmtSimplify", "tirx.CommonSubexprElim",
)  # fmt: skip


@dataclass(frozen=True)
class SpirvKernel:
    """The module of one launch.

    binary          the words, little endian; the entry point is "main"
    grid, block     number of workgroups, and threads of a workgroup, both (x, y, z). If lanes exchange values, the
                    block is a row of threads, because subgroups are parts of rows
    reads, writes   numbers of the arguments that it reads and writes
    table           whether the only push constant is the address of a table of the arguments' addresses
    lds             bytes of shared memory
    capabilities    SPIR-V's names of the capabilities that it needs
    """

    binary: bytes
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    table: bool
    lds: int
    capabilities: tuple[str, ...]


@dataclass(frozen=True)
class SpirvModule:
    """modules: one for each launch, by symbol. functions: the launches of each PrimFunc, by its name."""

    modules: dict[str, SpirvKernel]
    functions: dict[str, Function]


def compile_spirv(kernels: dict[str, tirx.PrimFunc], profile: Profile) -> SpirvModule:
    """Compiles `kernels` (name: PrimFunc with bound threads, static extents, and buffers as parameters) to SPIR-V.

    Raises ValueError, with the kernel's name, for a kernel that the profile cannot run (too many threads, too much
    shared memory, extents unknown at compile time), and for constructs that have no SPIR-V here.
    """
    target = vulkan_target(profile)

    def emit(name: str) -> tuple[Function, dict[str, SpirvKernel]]:
        func, modules = kernels[name], {}
        function, devices = lower(name, func, profile, target, LEAVE_OUT)
        coherent = {str(param) for param in func.attrs[COHERENT]} if COHERENT in func.attrs else set()
        devices = _finalize(tvm.IRModule(devices))
        by_symbol = {gv.name_hint: device for gv, device in devices.functions.items()}
        for launch in function.launches:
            params = function.params
            shared = [i for i, arg in enumerate(launch.args) if arg < len(params) and params[arg] in coherent]
            try:
                done = Emitter(by_symbol[launch.symbol], profile, launch.block, shared).run()
            except Unsupported as error:
                raise ValueError(f"kernel {name}: no SPIR-V for {error}") from error
            facts = done.local_size, done.reads, done.writes, done.table, done.lds
            capabilities = tuple(sorted(done.asm.capabilities))
            modules[launch.symbol] = SpirvKernel(done.binary, launch.grid, *facts, capabilities)
        return function, modules

    made = {name: emit(name) for name in kernels}
    modules = {symbol: module for _, of_one in made.values() for symbol, module in of_one.items()}
    return SpirvModule(modules, {name: function for name, (function, _) in made.items()})


@functools.cache
def vulkan_target(profile: Profile) -> tvm.target.Target:
    """TVM's target for a profile."""
    options = {
        "kind": "vulkan",
        "thread_warp_size": profile.wave,
        "max_num_threads": profile.most_threads,
        "max_threads_per_block": profile.most_threads,
        "max_shared_memory_per_block": profile.lds,
    }
    return tvm.target.Target(options, host="llvm")


def _finalize(module):
    """The passes that TVM runs on device functions before code generation, without those that only TVM's own code
    generators need."""
    x = tirx.transform
    return tvm.transform.Sequential([x.FP8StorageLegalize(), x.BF16StorageLegalize(), expand()])(module)
