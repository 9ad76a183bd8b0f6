"""Small kernels for tests of the SPIR-V generator: written, compiled, validated by spirv-val where it is installed, and
run."""

import shutil
import struct
import subprocess
from collections import Counter
from types import SimpleNamespace

import numpy as np
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T
from vulkan_harness import gpu, run

from mlc_amd.compiler.codegen.spirv import compile_spirv, opcodes
from mlc_amd.schedules.gpu.base import device

RUN = ("lavapipe", "generic")  # the second has no subgroups, no float16 arithmetic, no packed dot products
THREADS = 32
RNG = np.random.default_rng


def kernel(buffers, grid, block, body, coherent=()):
    """A PrimFunc: `buffers` name: (shape, dtype); `body(buffers as attributes, *axes)` emits the kernel."""
    with IRBuilder() as ir, T.prim_func(s_tir=True):
        T.func_name("test")
        T.func_attr(
            {"tirx.noalias": True, "global_symbol": "test", **({device.COHERENT: list(coherent)} if coherent else {})}
        )
        made = SimpleNamespace(
            **{name: T.arg(name, T.buffer(shape, dtype)) for name, (shape, dtype) in buffers.items()}
        )
        with device.launch(grid, block) as axes:
            body(made, *axes)
    return ir.get()


def compiled(func, profile):
    """The one module of a kernel, validated."""
    (module,) = compile_spirv({"test": func}, profile).modules.values()
    validate(module.binary)
    return module


def validate(binary):
    if tool := shutil.which("spirv-val"):
        command = [tool, "--target-env", "vulkan1.2", "--scalar-block-layout", "-"]
        result = subprocess.run(command, input=binary, capture_output=True)
        assert not result.returncode, (result.stdout + result.stderr).decode()


def instructions(binary):
    """[(name, *words)] of a module; names as in `opcodes`."""
    names, words = {number: name for name, number in opcodes.OP.items()}, struct.unpack(f"<{len(binary) // 4}I", binary)
    found, at = [], 5
    while at < len(words):
        count = words[at] >> 16
        found.append((names[words[at] & 0xFFFF], *words[at + 1 : at + count]))
        at += count
    return found


def counts(binary):
    return Counter(name for name, *_ in instructions(binary))


def execute(func, arrays, profile):
    """The arrays {name: array} after a run of the kernel, as attributes."""
    gpu()
    compiled(func, profile)
    return SimpleNamespace(**dict(zip(arrays, run(func, list(arrays.values()), profile), strict=True)))


def dtype_of(array):
    return str(array.dtype)


def elementwise(profile, op, *inputs, out=None):
    """op(*elements) of arrays of THREADS elements; out: the result's dtype (default: the first input's)."""
    inputs = {f"I{i}": np.ascontiguousarray(x) for i, x in enumerate(inputs)}
    arrays = inputs | {"out": np.zeros(THREADS, out or inputs["I0"].dtype)}

    def body(b, _group, i):
        T.buffer_store(b.out, op(*(T.Bind(getattr(b, name)[i]) for name in inputs)), [i])

    func = kernel({name: ((THREADS,), dtype_of(x)) for name, x in arrays.items()}, (1,), (THREADS,), body)
    return execute(func, arrays, profile).out


def integers(dtype, seed=0, low=None, high=None):
    info = np.iinfo(dtype)
    return RNG(seed).integers(
        info.min if low is None else low, info.max if high is None else high, THREADS, endpoint=True, dtype=dtype
    )
