"""The rocm device measures and is chosen, on a stand-in for AMD's bindings whose clock is known: times of kernels and
of a copy by events, the GPU by number, name or environment."""

import pytest
from hip_model import KERNELS, artifact_in, check

from mlc_amd.runtime.devices.hip import device as hip_device
from mlc_amd.runtime.devices.hip import gpu as hip_gpu
from mlc_amd.runtime.devices.hip import launches
from mlc_amd.runtime.devices.hip.device import HipDevice
from mlc_amd.runtime.devices.opening import open_device
from mlc_amd.runtime.errors import UserError
from mlc_amd.tools import target
from mlc_amd.tools.measure import bandwidth
from tests.dev import hip_recorder
from tests.dev.hip_recorder import BYTES_PER_MS, EVENT_MS, LAUNCH_MS, Recorder

TWO = ({"name": b"Radeon RX 7900 XTX"}, {"name": b"Radeon RX 7600", "gcnArchName": b"gfx1102"})


@pytest.fixture
def artifact(tmp_path):
    return artifact_in(tmp_path)


def test_events_time_each_launch(artifact):
    """Calls, order and results of a timed run; the graph is not in use, and the next run replays it again."""
    bindings = Recorder(KERNELS)
    device = HipDevice(artifact("gfx1100"), bindings=bindings)
    device.write("state", (1, 1))
    device.time("decode")
    made = bindings.calls.count("hipEventCreateWithFlags")
    bindings.calls.clear(), bindings.launched.clear()
    timed = device.time("decode")
    launch = ["hipEventRecord", "hipModuleLaunchKernel", "hipEventRecord"]
    assert bindings.calls == [
        "hipSetDevice", "hipMemcpyAsync", *4 * launch, "hipStreamSynchronize", *8 * ["hipEventElapsedTime"]
    ]  # fmt: skip
    assert [symbol for symbol, *_ in bindings.launched] == ["embed_k", "mix_k", "mix_k_1", "last_k"]
    assert [kernel for kernel, _, _ in timed] == ["embed", "mix", "mix", "last"]
    assert [seconds for _, seconds, _ in timed] == pytest.approx([(LAUNCH_MS + EVENT_MS) * 1e-3] * 4)
    assert [gap for *_, gap in timed] == pytest.approx([0, *3 * [EVENT_MS * 1e-3]], abs=1e-12)
    assert device.waited > 0 and made == 2 + 8  # those of the upload; one before and one after each launch, once
    bindings.calls.clear()
    check(device)
    assert "hipGraphLaunch" in bindings.calls
    device.close()
    assert bindings.leaks() == []


def test_copy_bandwidth(artifact, monkeypatch):
    """The fastest of several copies in the GPU's memory, read and written together; nothing stays allocated."""
    monkeypatch.setattr(launches, "COPY_BYTES", 1 << 20)
    bindings = Recorder(KERNELS)
    device = HipDevice(artifact("gfx1100"), bindings=bindings)
    used = bindings.used("device")
    bindings.calls.clear()
    rate, how = bandwidth.of_device(device)
    assert how == "copy"
    assert rate == pytest.approx(2 * (1 << 20) / ((1 << 20) / BYTES_PER_MS + EVENT_MS) * 1e3)
    assert bindings.calls.count("hipMemcpyAsync") == launches.COPIES + 1
    assert bindings.calls.index("hipMemcpyAsync") < bindings.calls.index("hipEventRecord")  # the first is a warm-up
    assert bindings.used("device") == used
    bindings.memory = used
    assert device.copy_bandwidth() == 0 and bandwidth.of_device(device) is None


@pytest.mark.parametrize("wanted, index", [(None, 0), ("1", 1), ("7600", 1), ("rx 79", 0), ("0", 0)])
@pytest.mark.parametrize("environment", [False, True])
def test_the_gpu_is_chosen_by_number_or_name(artifact, monkeypatch, wanted, index, environment):
    """--device has precedence over MLC_AMD_DEVICE; --arch native is that GPU's."""
    monkeypatch.setattr(hip_recorder.Recorder, "hipModuleLoadData", lambda self, image: (0, self._handle("module")))
    bindings = Recorder(KERNELS, gpus=TWO)
    monkeypatch.setenv("MLC_AMD_DEVICE", (wanted or "") if environment else "9")
    if wanted is None and not environment:
        monkeypatch.delenv("MLC_AMD_DEVICE")
    monkeypatch.setattr(hip_device, "open_bindings", lambda: bindings)
    monkeypatch.setattr(hip_gpu, "open_bindings", lambda: bindings)
    monkeypatch.setattr(hip_gpu, "kfd_gpus", lambda: [{"arch": "gfx1100"}])
    given = None if environment else wanted
    device = open_device(artifact("gfx1100", "gfx1102"), given)
    assert (device.gpu.index, device.code_arch) == (index, ("gfx1100", "gfx1102")[index])
    assert target.arch_here("rocm", given) == ("gfx1100", "gfx1102")[index]
    check(device)


def test_no_such_gpu(artifact, monkeypatch):
    bindings = Recorder(KERNELS, gpus=TWO)
    there = "no such HIP device here; there are 0: Radeon RX 7900 XTX, 1: Radeon RX 7600"
    with pytest.raises(UserError, match=f"--device 2: {there}"):
        HipDevice(artifact("gfx1100"), index="2", bindings=bindings)
    monkeypatch.setenv("MLC_AMD_DEVICE", "arc")
    with pytest.raises(UserError, match=f"MLC_AMD_DEVICE arc: {there}"):
        HipDevice(artifact("gfx1100"), bindings=bindings)
    with pytest.raises(UserError, match=r"compiled for gfx1100, but this machine has gfx1102 \(Radeon RX 7600\)"):
        HipDevice(artifact("gfx1100"), index="1", bindings=bindings)
