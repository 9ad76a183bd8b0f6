"""What makes compiling fast, and must not change what is compiled."""

import gc
import struct

import tvm
from tvm import tirx
from tvm.tirx.script import builder as T

from mlc_amd.compiler import pipeline
from mlc_amd.compiler.codegen import rocm
from mlc_amd.compiler.codegen.cpu import CpuTarget
from mlc_amd.compiler.codegen.lower import lower as lowered_kernel
from mlc_amd.compiler.codegen.lower import walk
from mlc_amd.compiler.codegen.spirv.asm import Asm
from mlc_amd.compiler.gguf import synthetic
from mlc_amd.compiler.lowering import lower
from mlc_amd.runtime.options import CompileOptions
from mlc_amd.schedules.gpu.base.arch import ARCHS
from tests.compiler.codegen.test_rocm_codegen import kernel


def test_long_kernels_are_compiled_first(tmp_path):
    target, done = CpuTarget("x86-64-v3"), []
    lower(synthetic("tiny:q4_0"), target, 64)
    few = {name: kernel for name, kernel in target.kernels.items() if name.startswith(("embed", "rms_norm"))}
    _, launches = target.compile_arch(target.arch, few, tmp_path, done.append)
    assert done[0].startswith("rms_norm") and done[-1].startswith("embed") and sorted(done) == list(launches)


def test_nothing_looks_for_garbage_while_a_graph_is_made(tmp_path, monkeypatch):
    seen = []

    def lowered(*_):
        seen.append(gc.isenabled())
        raise KeyboardInterrupt

    monkeypatch.setattr(pipeline, "lower", lowered)
    try:
        pipeline.compile_model(synthetic("tiny:q4_0"), tmp_path / "out", CompileOptions(target="cpu"))
    except KeyboardInterrupt:
        seen.append(gc.isenabled())
    assert seen == [False, True]


def test_constants_and_types_are_made_once():
    asm = Asm()
    zeros = [asm.const("f32", value) for value in (0.0, -0.0, 0, False, 0.0)]
    assert zeros[0] == zeros[2] == zeros[3] == zeros[4] != zeros[1]
    made = len(asm.globals)
    assert asm.type("f32") == asm.type("f32") and asm.const("i32", -1) == asm.const("i32", 0xFFFFFFFF)
    words = struct.pack("<f", -0.0)
    assert struct.unpack("<I", words)[0] in asm.globals and len(asm.globals) > made


def test_lowering_of_intrinsics_sees_no_values_of_functions():
    """It substitutes them, too: an exponential of a tanh of an erf would take seconds, with one more function hours."""

    def body(b, _group, thread):
        T.buffer_store(b.Y, T.erf(T.Bind(T.tanh(T.Bind(b.X[thread])))), [thread])

    bound = []

    @tvm.instrument.pass_instrument
    class Before:
        def run_before_pass(self, module, info):
            if info.name.endswith("LowerIntrin"):
                walk(module["chain_kernel"].body, tirx.Bind, lambda bind: bound.append(str(bind.var.ty)))

    arch = ARCHS["gfx1100"]
    func = kernel({name: ((32,), "float32") for name in "XY"}, (1,), (32,), body)
    _, lowered = lowered_kernel("chain", func, arch, rocm.rocm_target(arch))
    with tvm.transform.PassContext(instruments=[Before()]):
        rocm._finalize(arch)(tvm.IRModule(lowered))
    assert bound and set(bound) == {"int32"}
