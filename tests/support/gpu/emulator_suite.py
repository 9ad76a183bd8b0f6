"""What each run of the tests executes in the ISA emulator, for each of three instruction sets; all other emulated tests
are marked full.

The emulator compiles an instruction set's operations once a process, which takes most of the time. So each set has a
file, which one worker of pytest-xdist runs: test_emulator_gfx1100.py and so on derive from `OnArch` and `SameOnAll`.
"""

from pathlib import Path
from typing import ClassVar

import architectures
import numpy as np
import pytest
import reference
from attention_cases import Case, Rows, check_attention, check_output, outputs, pack
from few_functions import few_functions
from workloads import linear_op

from mlc_amd.compiler.codegen.rocm import compile_hsaco
from mlc_amd.compiler.gguf import GGUFModel, synthetic
from mlc_amd.compiler.pipeline import compile_model
from mlc_amd.runtime.artifact.artifact import Artifact
from mlc_amd.runtime.cache.kv_pool import ONE_SEQUENCE, KvSize
from mlc_amd.runtime.devices.hip.device import HipDevice
from mlc_amd.runtime.engine.engine import Engine
from mlc_amd.runtime.options import CompileOptions
from mlc_amd.schedules.gpu.attention.attention import attention
from mlc_amd.schedules.gpu.attention.attention_step import scratch_shapes
from mlc_amd.schedules.gpu.base.arch import resolve
from mlc_amd.schedules.gpu.linear.gemv_plan import linear_default
from mlc_amd.schedules.operators.attention import SLOTS, Attention, CausalAttention, Rope
from mlc_amd.tools.reference.attention import attention_reference
from tests.compiler import test_generic
from tests.compiler.codegen import test_rocm_codegen
from tests.dev.gfxemu import emulate, emulate_interleaved
from tests.dev.hip_emulated import emulated
from tests.dev.hip_recorder import Recorder
from tests.dev.quality import kl_divergence
from tests.schedules.gpu import (
    test_gpu_experts,
    test_gpu_gemm,
    test_gpu_gemv,
    test_gpu_norm_linear,
    test_gpu_sample,
)

MAX_KL = 1e-3  # nats
# Formats whose instructions are counted: those of most models, and others that only `make test-all` runs.
FORMATS = ("q4_0", "q4_k", *(pytest.param(fmt, marks=pytest.mark.full) for fmt in ("q6_k", "q8_0")))
MARGIN = 1.2  # how many times the instructions of `OnArch.today` a GEMV may take
EXPERTS = ("q4_k", "rows q8_0")  # cases of test_gpu_experts: one row, several
# linear and gate/up kernels of test_gpu_gemm
GEMM = (("mixed-matrix", "residual-matrix", "gates-float"), ("small-matrix",))


def compiled_functions(model: GGUFModel, arch: str, out: Path) -> Artifact:
    """The model with 64 tokens of context and FUNCTIONS."""
    with few_functions():
        compile_model(model, out, CompileOptions(target="rocm", arch=arch, ctx=64))
    return Artifact.open(out)


def check_model(artifact, spec: str, arch: str, run_hsaco, wave_order) -> None:
    """A token, a chunk and a token after it against the numpy reference: the rocm device itself, on AMD's calls
    answered by the emulator. MLC_AMD_GRAPH must be 0: the comparison of graphs at load would run everything six
    times."""
    device = emulated_device(artifact, arch, run_hsaco, wave_order)
    ids = np.random.default_rng(7).integers(0, 1024, 38)
    exact = reference.forward(synthetic(spec), ids)
    engine = Engine(artifact, device)
    last = [engine.decode(int(ids[0])), engine.prefill(ids[1:-1]), engine.decode(int(ids[-1]))]
    assert kl_divergence(exact[[0, -2, -1]], np.stack(last)) < MAX_KL


def check_architecture(name: str, arch: str, run_hsaco, folder: Path) -> None:
    """Two chunks on matrix units and three decode steps of a model of architectures.py, beyond its window, against
    exact logits. MLC_AMD_GRAPH as for `check_model`."""
    artifact = compiled_functions(architectures.tiny(name), arch, folder / "model")
    engine = Engine(artifact, emulated_device(artifact, arch, run_hsaco))
    exact = architectures.exact()
    ids, (first, last) = exact["ids"], exact["positions"]
    found = [engine.prefill(ids[: first + 1])]
    engine.prefill(ids[first + 1 : last - 2])
    found.append([engine.decode(int(i)) for i in ids[last - 2 :]][-1])
    assert kl_divergence(exact[name], np.stack(found)) < MAX_KL


def emulated_device(artifact, arch: str, run_hsaco, wave_order=5, kv: KvSize = ONE_SEQUENCE) -> HipDevice:
    """The rocm device with a GPU of that arch that the emulator stands in for. kv: how large its cache is."""
    code = (artifact.path / artifact.manifest["libraries"][arch]).read_bytes()
    kernels = emulated(artifact.manifest, arch, code, run_hsaco, wave_order)
    return HipDevice(artifact, kv=kv, bindings=Recorder(kernels, gpus=[{"gcnArchName": arch.encode()}]))


class Emulated:
    """Tests of the arch `arch`."""

    arch: str

    @pytest.fixture(autouse=True)
    def needs(self, emulator, linker):
        """The emulator, and what links AMD's code."""


class OnArch(Emulated):
    """Of what differs between instruction sets: products, lanes, barriers. today: by format, wave-instructions that a
    GEMV of 4096 columns takes for 1000 weights; eight: the same of a GEMM of eight rows."""

    today: ClassVar[dict[str, float]]
    eight: ClassVar[dict[str, float]]

    @pytest.mark.parametrize("fmt", FORMATS)
    def test_gemv_takes_no_more_instructions(self, fmt):
        """Beside a correct result: codes are loaded 16 bytes at a time, and no more instructions run than MARGIN
        allows."""
        n, k, arch = 16, 4096, resolve(self.arch)
        result = test_gpu_gemv.run_linear(
            self.arch, [(fmt, n)], k, (False,), False, linear_default(linear_op([(fmt, k)], k, 1, "rows"), arch)
        )
        loads = {name: count for name, count in result.by_mnemonic.items() if "load" in name}
        wide = sum(count for name, count in loads.items() if name.endswith(("b128", "dwordx4")))
        assert wide * arch.wave * 16 >= test_gpu_gemv.code_bytes(fmt, n * k), loads
        assert result.total * 1000 / (n * k) <= MARGIN * self.today[fmt]

    @pytest.mark.parametrize("fmt", FORMATS)
    def test_eight_rows_take_no_more_instructions(self, fmt):
        """As `test_gemv_takes_no_more_instructions`."""
        assert test_gpu_gemm.instructions_of_eight(self.arch, fmt) <= MARGIN * self.eight[fmt]

    @pytest.mark.parametrize("name", GEMM[0])
    def test_gemm(self, name):
        test_gpu_gemm.check_linear(self.arch, name, GEMM)

    def test_gate_up_swiglu(self):
        test_gpu_gemm.check_swiglu(self.arch, "small-matrix", GEMM)

    @pytest.mark.parametrize("name", EXPERTS)
    def test_experts(self, name):
        case = test_gpu_experts.CASES[name]
        test_gpu_experts.check_gate_up(case, resolve(self.arch), test_gpu_experts.emulated)
        test_gpu_experts.check_down(case, resolve(self.arch), test_gpu_experts.emulated)

    def test_norms_between_linears(self):
        test_gpu_norm_linear.check_prepared(self.arch, "q4_0", 1, 64, 512)
        test_gpu_norm_linear.check_completed(self.arch, "q4_0", 1, 512)
        test_gpu_norm_linear.check_lanes(self.arch, "q4_0", 8)

    def test_barrier_and_shuffles(self):
        test_rocm_codegen.test_barrier(resolve(self.arch), 3)
        test_rocm_codegen.test_shuffles(resolve(self.arch), np.float32)

    @pytest.mark.full
    def test_rows_rotate_in_their_attention(self):
        """Rows of several sequences, and several of one, whose keys are written in the same launch."""
        states = Rows((0, 200, 3)), Rows((70,), (125, 5))
        case = Case(4, 2, 64, m=8, layout="rows", several=8, rope=Rope(True, 64, 1e-6), states=states)
        kernel = attention(case.op, resolve(self.arch), "a")
        module = compile_hsaco({"a": kernel}, resolve(self.arch))
        check_attention(case, lambda arrays: emulate(module, "a", arrays))

    def test_attention_splits_may_arrive_in_any_order(self):
        """Decode attention's workgroups under way together: whichever comes last joins the same results."""
        heads, kv_heads, d, ctx, position = 4, 1, 64, 1152, 1089
        arch, rng = resolve(self.arch), np.random.default_rng(1)
        layer = Attention(heads, kv_heads, d, ctx)
        module = compile_hsaco(
            {"a": attention(CausalAttention(layer=layer, m=1, single=1, layout=""), arch, "a")}, arch
        )
        (step,) = module.functions["a"].launches
        k, v = (rng.standard_normal((kv_heads, ctx, d)).astype(np.float16) for _ in "kv")
        Kc, Vc = pack(k, v)
        Qo = (rng.standard_normal((1, heads, d)) * 2 * layer.query_scale).astype(np.float16)
        keys, values = (x[:, : position + 1].astype(np.float64) for x in (k, v))
        exact = attention_reference(layer, Qo.astype(np.float64) / layer.query_scale, keys, values, position)

        def results(run, **options):
            """(the attention's result, the workgroup that joined)"""
            scratch = {
                name: np.full(shape, np.nan if dtype == "float32" else 0, dtype)
                for name, (shape, dtype) in scratch_shapes(heads, d).items()
            }
            out, blocks = outputs(1, heads * d), np.arange(layer.blocks, dtype=np.int32)
            places = {"rows": np.array([[position, 7]], np.int32), "pages": np.tile(blocks, (SLOTS, 1))}
            given = {"state": np.array([1, 1, 0, 0], np.int32), **places, "Qo": Qo, "Kc": Kc, "Vc": Vc}
            found = run(module, "a", given | scratch | out, **options)
            assert not scratch["Arrived"].any()
            check_output(out, "", 1, exact)
            return out["X"], found

        alone, _ = results(emulate)
        groups = [(0, split, 0) for split in range(step.grid[1])]
        orders = [{"seed": seed} for seed in (1, 2)]
        orders += [{"seed": 3, "first": groups[::-1]}, {"seed": 4, "first": groups[1:] + groups[:1]}]
        last = set()
        for order in orders:
            together, [(atomics, _)] = results(emulate_interleaved, **order)
            np.testing.assert_array_equal(together, alone)
            last.add(atomics[-1])
        assert len(groups) >= 5 and len(last) >= 2, last


class SameOnAll(Emulated):
    """Of what is the same code on each: every run has one of them."""

    def test_gemv_of_segments(self):
        segments = [("q4_k", 64), ("q5_0", 21), ("q6_k", 16), ("mxfp4", 16), ("iq1_m", 16)]
        test_gpu_gemv.run_linear(self.arch, segments, 512, (True, True, False, True, False), False, wave_order=1)

    @pytest.mark.full  # a greedy one is part of test_model; Mesa's CPU driver has the others (test_gpu_sample.py)
    def test_sampling(self):
        test_gpu_sample.check_emulated(self.arch)

    def test_operators_without_a_kernel_of_their_own(self, tmp_path):
        """Functions, and reductions of every size, as `generic.py` schedules them."""
        target = ("rocm", self.arch)
        test_generic.test_functions_of_one_number(target, tmp_path)
        test_generic.test_softmax(target, (7, 129), tmp_path)
        test_generic.test_large_reductions(target, (3, 8, 300), tmp_path)

    @pytest.mark.full
    def test_more_operators_without_a_kernel_of_their_own(self, tmp_path):
        """Limits, casts and indices, and what lies between kernels of ours."""
        target = ("rocm", self.arch)
        test_generic.test_limits(target, tmp_path)
        test_generic.test_halves_and_integers(target, tmp_path)
        test_generic.test_between_kernels_of_ours(target, tmp_path)
