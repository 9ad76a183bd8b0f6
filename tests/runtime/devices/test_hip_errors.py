"""Why there is no GPU to run on: what the device and `doctor` say, on made-up machines and with AMD's real package and
library."""

import ctypes.util
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mlc_amd.runtime.devices.hip import api as hip
from mlc_amd.runtime.devices.hip import diagnosis
from mlc_amd.runtime.devices.hip.gpu import list_gpus
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.host import kfd_gpus
from mlc_amd.tools.checks import machine as this_machine
from mlc_amd.tools.commands import doctor
from tests.dev.hip_recorder import Recorder


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Files as the kernel shows them on a machine with a Radeon; arguments of why_no_gpu."""
    node = tmp_path / "nodes" / "1"
    node.mkdir(parents=True)
    (node.parent / "0").mkdir()
    (node.parent / "0" / "properties").write_text("cpu_cores_count 16\ngfx_target_version 0\n")
    (node / "properties").write_text(
        "simd_count 96\ngfx_target_version 110501\ndrm_render_minor 128\nlocation_id 50432\ndomain 0\n"
    )
    (tmp_path / "kfd").touch()
    for name in diagnosis.HIDING:
        monkeypatch.delenv(name, raising=False)
    return {"kfd": tmp_path / "kfd", "topology": tmp_path / "nodes"}


def forbid(monkeypatch, *words):
    monkeypatch.setattr(os, "access", lambda path, mode: not any(word in str(path) for word in words))


def test_topology(machine):
    assert kfd_gpus(machine["topology"]) == [{"arch": "gfx1151", "node": "/dev/dri/renderD128", "pci": "0000:c5:00.0"}]


@pytest.mark.parametrize(
    "forbidden, code, env, message",
    [
        ((), "hipErrorInsufficientDriver", None, "kernel driver is too old"),
        (("kfd",), "hipErrorNoDevice", None, r"no permission on .*kfd; join its group: sudo usermod -aG render"),
        (("renderD128",), "hipErrorNoDevice", None, "no permission on /dev/dri/renderD128"),
        ((), "hipErrorNoDevice", "HIP_VISIBLE_DEVICES", r"\(gfx1151\) may be hidden by HIP_VISIBLE_DEVICES; unset it"),
        (
            (),
            "hipErrorNoDevice",
            None,
            "HIP 6.0 does not support this GPU .gfx1151.*newer ROCm.*HSA_OVERRIDE_GFX_VERSION",
        ),
    ],
)
def test_reasons(machine, monkeypatch, forbidden, code, env, message):
    forbid(monkeypatch, *forbidden)
    if env:
        monkeypatch.setenv(env, "")
    reason = diagnosis.why_no_gpu(code, (6, 0), **machine)
    assert re.search(message, reason) and "\n" not in reason


def test_no_driver(machine, tmp_path):
    assert "modprobe amdgpu" in diagnosis.why_no_gpu(
        "hipErrorNoDevice", (6, 0), tmp_path / "absent", machine["topology"]
    )


def test_driver_without_gpu(machine, tmp_path):
    assert "no AMD GPU for compute" in diagnosis.why_no_gpu(
        "hipErrorNoDevice", (6, 0), machine["kfd"], tmp_path / "absent"
    )


# ---- AMD's package and library


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "rocm", None)  # makes importing it fail
    monkeypatch.setitem(sys.modules, "rocm.bindings.hip", None)
    with pytest.raises(UserError, match=r"pip install 'mlc-amd\[rocm\]'"):
        hip.open_bindings()


def test_stand_in_has_the_bindings_signatures_and_constants():
    real = pytest.importorskip("rocm.bindings.hip")
    calls = {
        name: value for name, value in vars(Recorder).items() if name.startswith("hip") and inspect.isfunction(value)
    }
    assert len(calls) > 25
    for name, function in calls.items():
        stated = re.search(rf"^{name}\((.*?)\)", getattr(real, name).__doc__).group(1)
        parameters = [p for p in stated.split(",") if p.strip()]
        assert len(parameters) == len(inspect.signature(function).parameters) - 1, name
    for enum in (Recorder.hipError_t, Recorder.hipMemcpyKind, Recorder.hipStreamCaptureMode):
        for member in enum:
            assert getattr(getattr(real, enum.__name__), member.name) == member
    for name in ("hipStreamNonBlocking", "hipEventDisableTiming", "hipHostMallocMapped", "hipHostMallocNonCoherent"):
        assert getattr(real, name) == getattr(Recorder, name)
    for field in ("name", "gcnArchName", "totalGlobalMem", "integrated", "pciDomainID", "pciBusID", "pciDeviceID"):
        assert hasattr(real.hipDeviceProp_t, field)


@pytest.fixture
def library():
    """AMD's real library, with or without a GPU; skips where it is absent."""
    pytest.importorskip("rocm.bindings.hip")
    if ctypes.util.find_library("amdhip64") is None and not Path("/opt/rocm/lib/libamdhip64.so").exists():
        pytest.skip("libamdhip64 is not installed")


def test_old_library(library, monkeypatch):
    monkeypatch.setattr(hip, "OLDEST_RUNTIME", (1000, 0))
    with pytest.raises(UserError, match=r"AMD's HIP runtime here is version \d+\.\d+, which is too old; install ROCm"):
        hip.open_bindings()


@pytest.mark.skipif(Path("/dev/kfd").exists(), reason="there is a GPU")
def test_library_without_a_gpu(library, monkeypatch):
    monkeypatch.setattr(hip, "OLDEST_RUNTIME", (5, 0))  # Debian 12 has 5.2
    bindings = hip.open_bindings()
    with pytest.raises(hip.HipError) as error:
        list_gpus(hip.Hip(bindings))
    assert error.value.code == "hipErrorNoDevice"
    found = this_machine.rocm()
    assert found["gpus"] == [] and re.match(r"no /dev/kfd: .*; load the kernel driver", found["problem"])


def test_missing_library(monkeypatch):
    """In a process of its own: a library once loaded stays."""
    pytest.importorskip("rocm.bindings.hip")
    code = (
        "import ctypes.util; ctypes.util.find_library = lambda name: None\n"
        "from mlc_amd.runtime.devices.hip import api as hip\n"
        "from rocm.bindings.util import paths; paths.get_library_path = lambda *a: b'libamdhip64-absent.so'\n"
        "try: hip.open_bindings()\n"
        "except hip.UserError as e: print(e)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert re.match(
        r"cannot load AMD's HIP runtime \(libamdhip64-absent.so: cannot open shared.*\); install ROCm", done.stdout
    ), done


# ---- doctor


ROCM = {"bindings": "10.0", "runtime": "6.4", "problem": None, "override": None, "chips": [{"arch": "gfx1100"}]}
ROCM["gpus"] = [{"name": "Radeon", "index": 0, "arch": "gfx1100", "memory": 24 << 30, "integrated": False}]
BROKEN = {"gpus": [], "problem": "no permission on /dev/kfd; join its group: sudo usermod"}


@pytest.mark.parametrize(
    "facts, status, what, advice",
    [
        ({"rocm": ROCM}, "ok", "device 0, GPU Radeon, gfx1100", ""),
        ({"rocm": ROCM | BROKEN}, "problem", "no permission on /dev/kfd", "join its group: sudo usermod"),
        (
            {"rocm": ROCM | BROKEN | {"chips": []}},
            "missing",
            "no permission on /dev/kfd",
            "join its group: sudo usermod",
        ),
        (
            {"rocm": ROCM | {"override": "11.0.0", "chips": [{"arch": "gfx1103"}]}},
            "ok",
            "=11.0.0 is set; the chip is gfx1103",
            "",
        ),
        (
            {"rocm_linker": {"command": None, "problem": "no ld.lld; pip install"}},
            "missing",
            "no ld.lld",
            "pip install",
        ),
        ({"rocm_linker": {"command": "/usr/bin/ld.lld", "problem": None}}, "ok", "/usr/bin/ld.lld", ""),
    ],
)
def test_doctor(facts, status, what, advice):
    *_, last = doctor.judge(facts)
    assert last[0] == status and what in last[1] and last[2] == advice


def test_facts_of_this_machine_can_be_judged():
    facts = {"rocm": this_machine.rocm(), "rocm_linker": this_machine.rocm_linker()}
    assert all(
        status in ("ok", "missing", "problem") and "\n" not in what + advice
        for status, what, advice in doctor.judge(facts)
    )
