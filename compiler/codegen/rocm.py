"""Compiles TensorIR kernels to AMD code objects (HSACO), with TVM's LLVM and without a ROCm installation.

In: PrimFuncs with bound threads, and a `GpuArch`. Out: an `HsacoModule`: one code object with all kernels, and the
launches of each PrimFunc. `lower.py` makes device functions of the kernels; LLVM and a linker compile these. This
module also inserts, before each barrier, the wait for LDS operations that TVM's code generator omits. Thread-safe.
"""

import functools
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx
from tvm.tirx.build import codegen_build
from tvm.tirx.op import call_llvm_intrin

from mlc_amd.compiler.codegen.functions import expand
from mlc_amd.compiler.codegen.lower import Function, lower
from mlc_amd.runtime import extras
from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.gpu.base.arch import MAX_THREADS, GpuArch

LINKERS = ("/opt/rocm/llvm/bin/ld.lld", "ld.lld", *(f"ld.lld-{version}" for version in range(22, 14, -1)))
OLDEST_LINKER = 15  # the first LLVM version whose linker knows code objects of version 5
# LLVM 22 marks code objects as version 6, which ROCm before 6.3 and old linkers refuse. Version 6 differs from 5 only
# for "generic" targets, so code objects are marked as version 5 here.
EI_ABIVERSION, CODE_OBJECT_V5 = 8, 3
NO_NEWS = (b"Unable to detect ROCm version", b"Cannot get maximum number of threads")
_STDERR = threading.Lock()  # held while this process's stderr is redirected
OCML = "__ocml_"  # prefix of the functions of ROCm's device library


@dataclass(frozen=True)
class HsacoModule:
    """hsaco: the bytes of the code object. functions: by PrimFunc. assembly: LLVM's text for all kernels."""

    hsaco: bytes
    functions: dict[str, Function]
    assembly: str


def compile_hsaco(kernels: dict[str, tirx.PrimFunc], arch: GpuArch) -> HsacoModule:
    """Compiles `kernels` (name: PrimFunc with bound threads, static extents, and buffers as parameters) to one code
    object.

    Raises UserError without a linker. Raises ValueError for a kernel that cannot be compiled: too many threads or too
    much LDS (LLVM would end the process), extents unknown at compile time, functions of ROCm's device library.
    """
    linker = find_linker()
    with _without_warnings():
        target = rocm_target(arch)
    functions, devices = {}, {}
    for name, func in kernels.items():
        functions[name], device = lower(name, func, arch, target)
        devices.update(device)
    module = _finalize(arch)(tvm.IRModule(devices))
    _LINKED.linker = linker
    try:
        with _without_warnings():
            built = codegen_build(module, target.with_host("llvm"))
        hsaco = _LINKED.hsaco
    finally:
        _LINKED.__dict__.clear()
    return HsacoModule(hsaco, functions, built.inspect_source("asm"))


@contextmanager
def _without_warnings():
    """Holds back what TVM's C++ code prints to stderr. Afterwards it prints that, except for the messages that ROCm is
    not installed (NO_NEWS)."""
    with _STDERR, tempfile.TemporaryFile() as held:
        sys.stderr.flush()
        stderr = os.dup(2)
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(stderr, 2)
            held.seek(0)
            for line in held:
                if not any(text in line for text in NO_NEWS):
                    os.write(stderr, line)
            os.close(stderr)


@functools.cache
def rocm_target(arch: GpuArch) -> tvm.target.Target:
    """TVM's target for an arch."""
    options = {
        "kind": "rocm",
        "mcpu": arch.name,
        "thread_warp_size": arch.wave,
        "max_num_threads": MAX_THREADS,
        "max_threads_per_block": MAX_THREADS,
        "max_shared_memory_per_block": arch.lds,
    }
    return tvm.target.Target(options, host="llvm")


# ---- finalization: the wait before barriers


def _finalize(arch):
    x = tirx.transform
    storage = [x.FP8StorageLegalize(), x.BF16StorageLegalize(), x.LowerWarpMemory()]
    return tvm.transform.Sequential(
        [*storage, x.StmtSimplify(), expand(), values_in_memory(), x.LowerIntrin(), wait_before_barriers(arch)]
    )


def wait_before_barriers(arch):
    """The pass that makes a wave wait for its LDS operations before each barrier. TVM emits a bare s_barrier, which
    orders waves but not their memory operations: other waves could read LDS before the writes are complete. This must
    be the last pass before code generation."""
    name, operand, dtype = arch.code.wait
    wait = tirx.Evaluate(call_llvm_intrin("void", name, tirx.const(operand, dtype)))

    def before(node, _):
        call: Any = node.value
        is_barrier = getattr(getattr(call, "op", None), "name", "") == "tirx.tvm_storage_sync"
        return tirx.SeqStmt([wait, node]) if is_barrier and call.args[0].value.startswith("shared") else node

    @tirx.transform.prim_func_pass(opt_level=0, name="WaitBeforeBarriers")
    def insert(func, _module, _context):
        return func.with_body(tvm_ffi.structural_mutate(func.body, [(tirx.Evaluate, before)]))

    return insert


# ---- finalization: values that TVM's simplifier does not need


def values_in_memory():
    """The pass that puts bound floats, unsigned words and vectors into local buffers of one element, which LLVM turns
    into registers. Must run after `expand`, which binds many values, and before intrinsics are lowered.

    Reason: TVM's lowering of intrinsics and its code generator substitute bound values into the expressions of their
    simplifier. These double with every value that is used twice: a chain of 25 took a minute. Indices (int32) stay
    bound values, because the simplifier needs them.
    """

    @tirx.transform.prim_func_pass(opt_level=0, name="ValuesInMemory")
    def move(func, _module, _context):
        places, first = {}, tirx.const(0, "int32")

        def bind(node, mutator):
            value, dtype = mutator.mutate(node.value), str(node.var.ty)
            if not re.fullmatch(r"(float|bfloat|uint)\d+|[a-z]+\d+x\d+", dtype):
                return tirx.Bind(node.var, value)
            buffer = tirx.decl_buffer((1,), dtype, name=node.var.name, scope="local")
            places[node.var] = tirx.BufferLoad(buffer, [first])
            return tirx.SeqStmt([tirx.AllocBuffer(buffer), tirx.BufferStore(buffer, value, [first])])

        callbacks = [(tirx.Bind, bind), (tirx.Var, lambda var, _: places.get(var, var))]
        return func.with_body(tvm_ffi.structural_mutate(func.body, callbacks))

    return move


# ---- linking


def find_linker() -> list[str]:
    """The command of an ELF linker for AMD GPUs: ROCm's or the system's lld, else the ziglang package's. Raises
    UserError if there is none."""
    candidates = [[path] for name in LINKERS if (path := shutil.which(name))]
    if importlib.util.find_spec("ziglang"):
        candidates.append([sys.executable, "-m", "ziglang", "ld.lld"])
    if linker := next((command for command in candidates if linker_version(tuple(command)) >= OLDEST_LINKER), None):
        return linker
    found = "ld.lld is too old" if candidates else "no ld.lld found"
    raise UserError(f"{found} to link GPU code; install one: {extras.install('rocm')}, or lld {OLDEST_LINKER} or newer")


@functools.cache
def linker_version(command: tuple[str, ...]) -> int:
    """The LLVM version of an lld; 0 if it reports none."""
    result = subprocess.run([*command, "--version"], capture_output=True, text=True)
    found = re.search(r"LLD (\d+)", result.stdout)
    return int(found[1]) if found else 0


def link(obj: bytes, linker: list[str]) -> bytes:
    """Links a relocatable object to a code object. Raises ValueError with the linker's message if symbols are missing.
    Writes no file, so a process that is killed leaves none."""
    with open(os.memfd_create("kernels.o"), "wb", buffering=0) as source:
        source.write(obj[:EI_ABIVERSION] + bytes([CODE_OBJECT_V5]) + obj[EI_ABIVERSION + 1 :])
        number = source.fileno()
        command = [*linker, "--no-undefined", "-shared", f"/proc/self/fd/{number}", "-o", "-"]
        result = subprocess.run(command, capture_output=True, pass_fds=[number])
    if result.returncode:
        errors = result.stderr.decode(errors="replace")
        why = " (kernels cannot use functions of ROCm's device library)" if OCML in errors else ""
        raise ValueError(f"linking GPU kernels failed{why}: {errors.strip()}")
    return result.stdout


_LINKED = threading.local()  # state of compile_hsaco on this thread: `linker` goes in, `hsaco` comes out


@tvm_ffi.register_global_func("tvm_callback_rocm_link", override=True)
def _link_callback(obj):
    """TVM passes the object file to this function. TVM would use the returned code object only to load it on a GPU."""
    _LINKED.hsaco = link(bytes(obj), _LINKED.linker)
    return _LINKED.hsaco


@tvm_ffi.register_global_func("tvm_callback_rocm_bitcode_path", override=True)
def _no_bitcode(*_):
    """No bitcode: ROCm's device library is not used, because it would need an installation, and its code depends on
    options."""
    return []
