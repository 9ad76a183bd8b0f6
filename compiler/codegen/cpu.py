"""The cpu target: layouts, kernels from schedules/cpu, and their compilation with LLVM to a shared library."""

import functools
import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import tvm
from tvm import s_tir, tirx

from mlc_amd.compiler.codegen.functions import expand
from mlc_amd.compiler.codegen.kernel_workers import ALONE, Workers
from mlc_amd.compiler.codegen.lower import has_blocks, in_threads, statements
from mlc_amd.compiler.codegen.object_cache import ObjectCache
from mlc_amd.compiler.codegen.target import Target, TensorTypes
from mlc_amd.compiler.functions import FunctionSpec
from mlc_amd.compiler.models.config import AttentionConfig
from mlc_amd.compiler.nodes import functions, params
from mlc_amd.runtime import devices
from mlc_amd.runtime.artifact.manifest import ManifestTarget
from mlc_amd.runtime.cache.kv_types import KV_TYPE
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.folders import temporary
from mlc_amd.schedules.cpu import registry
from mlc_amd.schedules.cpu.attention.cache import cache_types
from mlc_amd.schedules.cpu.base import arch as archs
from mlc_amd.schedules.cpu.base.arch import tile_rows
from mlc_amd.schedules.cpu.linear.planes import planes
from mlc_amd.schedules.operators.attention import SLOTS

COMPILERS = ("cc", "gcc", "clang")  # the first one that is found is used; without any, the ziglang package's
NATIVE = Path(devices.__file__).parent / "cpu.c"
LIBRARY = "kernels.so"
LONG = 512  # rows of the longest chunk
OBJECTS = ObjectCache()


class CpuTarget(Target):
    """The cpu target. arch: a name of schedules/cpu/base/arch.py. Raises UserError for an unknown name."""

    kind = "cpu"
    encoder_rows = (64, 512, 512)  # several sizes, because generic kernels compute all rows, not only live ones
    layout = "tile16"
    planes = staticmethod(planes)
    registry = registry

    def __init__(self, arch: str = "native", kv: str = KV_TYPE):
        self.arch = archs.resolve(arch)
        super().__init__([self.arch], kv)

    def functions(self, ctx: int) -> list[FunctionSpec]:
        """One size of chunks is enough: kernels compute live rows only, and a few rows cost little more than one."""
        m = min(LONG, max(ctx, 64))
        answers = f"answers:{min(SLOTS, m)}"
        return [
            FunctionSpec("decode", 1, 1, "all"),
            FunctionSpec(f"prefill_{m}", m, 0, "last"),
            FunctionSpec(f"mixed_{m}", m, min(SLOTS, m - 1), answers),
            FunctionSpec(f"score_{m}", m, 0, "all"),
        ]

    def act_layout(self, m: int, kind: str) -> str:
        return f"tiles:{tile_rows(m, self.arch)}" if kind == "int8" else ""

    def expert_tile(self, m: int) -> int:
        return tile_rows(m, self.arch)

    def cache_types(self, attention: AttentionConfig, ctx: int) -> TensorTypes:
        return cache_types(self.layer(attention, ctx))

    @property
    def description(self) -> ManifestTarget:
        return {
            "kind": "cpu",
            "arch": self.arch.name,
            "mcpu": self.arch.mcpu,
            "isa": self.arch.isa.__name__,
            "flags": list(self.arch.flags),
        }

    # ---- compilation

    def compile_kernels(self, mod: tvm.IRModule, directory: Path, progress, workers: Workers, joint=()) -> dict:
        """Compiles all kernels into one shared library. Returns {"libraries": {arch: file}, "launches": {}}."""
        kernels = {gv.name_hint: func for gv, func in functions(mod).items() if isinstance(func, tvm.tirx.PrimFunc)}
        done = []

        def step(name: str) -> None:
            done.append(name)
            progress("kernels", len(done), len(kernels))

        library, _ = self.compile_arch(self.arch, kernels, directory, step, workers)
        return {"libraries": {self.arch.name: library}, "launches": {}}

    def compile_arch(self, arch, kernels, directory, step=lambda name: None, workers=ALONE):
        """See `Target.compile_arch`. Each kernel is one launch: its function in the library."""
        names = sorted(kernels)

        def build(name: str) -> str:
            path = directory / f"{name}.o"

            def compiled() -> bytes:
                build_module({name: kernels[name]}, arch.target).write_to_file(str(path))
                return path.read_bytes()

            path.write_bytes(OBJECTS.get(name, kernels[name], arch.target, compiled))
            step(name)
            return str(path)

        longest_first = sorted(names, key=lambda name: statements(kernels[name]), reverse=True)
        objects = in_threads(build, longest_first, workers.count)  # so that no core waits for a long kernel at the end
        link_shared(sorted(objects), directory / LIBRARY)
        for path in objects:
            Path(path).unlink()
        steps = {name: [{"symbol": name, "args": list(range(len(params(kernels[name]))))}] for name in names}
        return LIBRARY, {name: {"scratch": [], "steps": steps[name]} for name in names}


# The passes of TVM's default pipeline that these kernels need. Most time of the default pipeline goes into passes whose
# work LLVM repeats (common subexpressions), and into passes for other kernels (GPU threads, shared memory, staged
# copies). Kernels do not check their arguments, which would be half of the code of a small kernel: shapes and types
# come from the plan for which the kernel was compiled.
_LOWERING = tvm.ir.transform.Sequential([
    tirx.transform.FlattenBuffer(),
    tirx.transform.NarrowDataType(32),
    tirx.transform.VectorizeLoop(True),
    tirx.transform.StorageRewrite(),
    tirx.transform.UnrollLoop(),
    tirx.transform.StmtSimplify(),
    s_tir.transform.RewriteUnsafeSelect(),
    tirx.transform.MakePackedAPI(),
    tirx.transform.LowerTVMBuiltin(),
    expand(gpu=False),
    tirx.transform.LowerIntrin(),
    tirx.transform.SkipAssert(),
])  # fmt: skip
_BLOCKS = tvm.ir.transform.Sequential([
    s_tir.transform.LowerInitBlock(),
    s_tir.transform.PlanAndUpdateBufferAllocationLocation(),
    s_tir.transform.ConvertBlocksToOpaque(),
    s_tir.transform.CompactBufferAllocation(),
    s_tir.transform.LowerMatchBuffer(),
    s_tir.transform.LowerOpaqueBlock(),
])  # fmt: skip


def build_module(kernels: dict[str, tirx.PrimFunc], target: tvm.target.Target) -> tvm.runtime.Module:
    """Compiles kernels with LLVM to a module that can be called, inspected or written to an object file.

    kernels: by name. A caller must pass arguments with the types and shapes of the kernel's parameters, in memory
    aligned to 64 bytes.
    """
    mod = tvm.IRModule({name: kernel.with_attr("global_symbol", name) for name, kernel in kernels.items()})
    mod = tirx.transform.BindTarget(target.with_host(target))(mod)
    if any(map(has_blocks, kernels.values())):
        mod = _BLOCKS(mod)
    return tvm.get_global_func("target.build.llvm")(_LOWERING(mod), target)


def link_shared(objects: list[str], output: Path) -> None:
    """Links object files of kernels, with the native code that they call (runtime/devices/cpu.c), to a shared library.
    Raises UserError without a C compiler."""
    with temporary("link") as folder:
        native = folder / "native.o"
        native.write_bytes(_native())
        compile_c("-shared", "-pthread", "-o", str(output), *objects, str(native), "-lm")


@functools.lru_cache(maxsize=1)
def _native() -> bytes:
    """The object file of runtime/devices/cpu.c."""
    with temporary("compile") as folder:
        made = folder / "native.o"
        compile_c("-O2", "-fPIC", "-pthread", "-c", "-o", str(made), str(NATIVE))
        return made.read_bytes()


def compile_c(*arguments: str) -> None:
    """Runs the first C compiler that is found with these arguments. Raises UserError without one, or if it fails."""
    compiler = next(([path] for name in COMPILERS if (path := shutil.which(name))), None)
    if compiler is None and importlib.util.find_spec("ziglang"):
        compiler = [sys.executable, "-m", "ziglang", "cc"]
    if compiler is None:
        raise UserError(
            "no C compiler found to link the kernels; install one (Debian: apt install gcc; anywhere: pip install "
            "ziglang)"
        )
    result = subprocess.run([*compiler, *arguments], capture_output=True, text=True)
    if result.returncode:
        raise UserError(f"linking the kernels with {compiler[0]} failed: {_reason(result.stderr)}")


def _reason(stderr: str) -> str:
    """The line of a compiler's messages that states the cause of a failure. The last line usually only states that it
    failed."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    full = [line for line in lines if "No space left" in line]
    errors = [line for line in lines if re.search(r"\berror\b|undefined|cannot", line)]
    advice = "; free some space there or set TMPDIR" if full else ""
    return next(iter([*full, *errors, *lines[-1:]]), "it does not say why") + advice
