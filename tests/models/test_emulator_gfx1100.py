"""gfx1100 (RDNA3) in the ISA emulator, and the verification of tuned plans that uses it."""

from typing import ClassVar

import pytest
from attention_cases import Case, check_attention
from emulator_suite import OnArch, SameOnAll, check_architecture, check_model

from mlc_amd.compiler.codegen.rocm import compile_hsaco
from mlc_amd.runtime.artifact.artifact import Artifact
from mlc_amd.schedules.gpu.attention.attention import attention
from mlc_amd.schedules.gpu.base.arch import resolve
from mlc_amd.schedules.operators.attention import Rope
from tests.dev.gfxemu import emulate


class TestGfx1100(OnArch, SameOnAll):
    arch = "gfx1100"
    today: ClassVar = {"q4_0": 34.7, "q4_k": 39.4, "q6_k": 56.5, "q8_0": 23.7}
    eight: ClassVar = {"q4_0": 113.2, "q4_k": 129.8, "q6_k": 149.8, "q8_0": 117.3}

    def test_model(self, emulator, compiled_for, monkeypatch):
        """A whole tiny model; test_rocm_models has others."""
        monkeypatch.setenv("MLC_AMD_GRAPH", "0")
        artifact = Artifact.open(compiled_for("rocm", self.arch, "tiny:q4_0", 64, few=True))
        check_model(artifact, "tiny:q4_0", self.arch, emulator, wave_order=5)

    @pytest.mark.full
    def test_architecture(self, emulator, tmp_path, monkeypatch):
        """Layers that keep a state; test_rocm_models has others."""
        monkeypatch.setenv("MLC_AMD_GRAPH", "0")
        check_architecture("lfm2", self.arch, emulator, tmp_path)

    def test_attention_with_a_window_takes_the_time_of_the_window(self):
        """Decode with sinks: the longer context takes no more instructions."""
        arch, counts = resolve(self.arch), []
        case = Case(
            2, 1, 64, rope=Rope(True, 64), states=((120, 1), (440, 1)),
            attributes={"window": 100, "sinks": True},
        )  # fmt: skip
        module = compile_hsaco({"a": attention(case.op, arch, "a")}, arch)
        check_attention(case, lambda arrays: counts.extend(step.total for step in emulate(module, "a", arrays)))
        assert len(counts) == 2 and counts[1] <= 1.02 * counts[0], counts
