"""The rocm device: which GPU and which code object it takes, and what it reports, on a stand-in for AMD's bindings."""

import pytest
from hip_model import KERNELS, artifact_in, check
from workloads import built

from mlc_amd.compiler.codegen.rocm import compile_hsaco
from mlc_amd.runtime.devices.hip import device as hip_device
from mlc_amd.runtime.devices.hip.code_objects import SAME_ISA, relabel
from mlc_amd.runtime.devices.hip.device import HipDevice
from mlc_amd.runtime.devices.hip.gpu import sibling
from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.gpu.base.arch import resolve
from mlc_amd.schedules.operators import RmsNorm
from tests.dev.hip_recorder import Recorder


@pytest.fixture
def artifact(tmp_path):
    return artifact_in(tmp_path)


@pytest.mark.parametrize(
    "gpus, archs, index, arch",
    [
        ([{"gcnArchName": b"gfx942:sramecc+:xnack-"}], ["gfx1100", "gfx942"], 0, "gfx942"),
        (
            [{"gcnArchName": b"gfx1036", "integrated": 1}, {}],
            ["gfx1036", "gfx1100"],
            1,
            "gfx1100",
        ),  # not the processor's own GPU
        ([{"gcnArchName": b"gfx1036", "integrated": 1}, {}], ["gfx1036"], 0, "gfx1036"),
        ([{"totalGlobalMem": 8}, {"totalGlobalMem": 16}], ["gfx1100"], 1, "gfx1100"),
        ([{"gcnArchName": b"gfx1032"}], ["gfx1030"], 0, "gfx1030"),
        ([{"gcnArchName": b"gfx1201"}], ["gfx1100", "gfx1200"], 0, "gfx1200"),
    ],
)
def test_choice(artifact, gpus, archs, index, arch):
    device = HipDevice(artifact(*archs), bindings=Recorder(KERNELS, gpus=gpus))
    assert (device.gpu.index, device.code_arch) == (index, arch)
    check(device)


@pytest.mark.parametrize(
    "have, compiled", [("gfx1201", "gfx1100"), ("gfx1102", "gfx1100"), ("gfx1010", "gfx1012"), ("gfx1030", "gfx1012")]
)
def test_no_code_for_this_gpu(artifact, have, compiled):
    with pytest.raises(
        UserError, match=f"compiled for {compiled}, but this machine has {have} .Radeon.; .*--arch {have}"
    ):
        HipDevice(artifact(compiled), bindings=Recorder(KERNELS, gpus=[{"gcnArchName": have.encode()}]))


def test_sibling_prefers_its_own():
    assert sibling("gfx1036", ["gfx1030", "gfx1036"]) == "gfx1036"
    assert sibling("gfx1103", ["gfx1100"]) is None


@pytest.mark.parametrize("group", SAME_ISA, ids=lambda group: next(iter(group)))
def test_siblings_code_is_what_llvm_makes_for_them(group):
    """Relabeled code for one chip of a group equals, byte for byte, code compiled for another."""
    op = RmsNorm(k=512, m=4, eps=1e-6, layout="rows", rows="all")
    made = {arch: compile_hsaco({"k": built(op, resolve(arch), "k")}, resolve(arch)).hsaco for arch in group}
    first = next(iter(group))
    for arch in group:
        assert relabel(made[first], first, arch) == made[arch]


def test_override_is_reported(artifact, monkeypatch):
    monkeypatch.setenv("HSA_OVERRIDE_GFX_VERSION", "11.0.0")
    monkeypatch.setattr(hip_device, "kfd_gpus", lambda: [{"arch": "gfx1103", "pci": "0000:03:00.0"}])
    device = HipDevice(artifact("gfx1100"), bindings=Recorder(KERNELS))
    assert device.name == "Radeon (gfx1100 by HSA_OVERRIDE_GFX_VERSION=11.0.0; the chip is gfx1103)"


@pytest.mark.parametrize(
    "change, message",
    [
        (
            {"fail": {"hipModuleLoadData": "hipErrorNoBinaryForGpu"}},
            "HIP 6.4 cannot load the kernels for gfx1100 .*newer ROCm",
        ),
        ({"kernels": {"embed_k": KERNELS["embed_k"]}}, "lacks a kernel of this model"),
        ({"gpus": []}, "no /dev/kfd|no permission|no AMD GPU|does not use"),
    ],
)
def test_errors_at_load(artifact, change, message):
    with pytest.raises(UserError, match=message):
        HipDevice(artifact("gfx1100"), bindings=Recorder(**({"kernels": KERNELS} | change)))
