"""--target auto: which target a machine gets, with a stand-in for AMD's bindings and with what drivers tell of GPUs."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import vulkan_harness

from mlc_amd.compiler.codegen import spirv_reader
from mlc_amd.compiler.codegen.vulkan_target import VulkanTarget
from mlc_amd.runtime.devices.hip import api as hip_api
from mlc_amd.runtime.devices.vulkan import fragments
from mlc_amd.runtime.devices.vulkan import gpu as vulkan
from mlc_amd.runtime.errors import UserError
from mlc_amd.tools import lane_probe, target
from mlc_amd.tools.checks import machine
from tests.dev.hip_recorder import Recorder

NO_HIP = UserError("target rocm needs the package rocm-bindings-hip; install it")
NO_VULKAN = UserError("no Vulkan driver is installed")
CARD = {"arch": "gfx1100", "node": "/dev/dri/renderD128", "pci": "0000:03:00.0"}


@pytest.fixture
def here(monkeypatch):
    """here(hip=, vulkan=, kfd=, cards=): makes this machine show those GPUs; an error where there are none."""

    def answer(found):
        def call(*_):
            if isinstance(found, Exception):
                raise found
            return found

        return call

    def machine_with(hip=NO_HIP, gpus=NO_VULKAN, kfd=(), cards=()):
        monkeypatch.delenv("MLC_AMD_DEVICE", raising=False)
        monkeypatch.setattr(hip_api, "open_bindings", answer(hip))
        monkeypatch.setattr(vulkan, "list_gpus", answer(gpus))
        monkeypatch.setattr(target, "kfd_gpus", lambda: list(kfd))
        monkeypatch.setattr(machine, "gpus", lambda: list(cards))

    return machine_with


@pytest.fixture
def gpus() -> dict[str, vulkan.VulkanGpu]:
    """Mesa's CPU driver, and the same as a Radeon's."""
    cpu = vulkan_harness.gpu()
    radeon = replace(
        cpu,
        index=1,
        type="discrete",
        vendor=0x1002,
        driver_id=3,
        name="Radeon RX 7600 (RADV NAVI33)",
        subgroup=(64, 32, 64),
        dot=True,
        matrices=(),
        limits=cpu.limits | {"shared_memory": 65536, "push_constants": 256},
    )
    return {"cpu": cpu, "radeon": radeon}


def test_rocm_comes_first(here, capsys):
    small, large = {"gcnArchName": b"gfx1036", "integrated": 1}, {"gcnArchName": b"gfx1100"}
    here(hip=Recorder({}, gpus=[small, large]), kfd=[CARD])
    assert target.resolve("auto", "native") == ("rocm", "gfx1100")
    assert capsys.readouterr().err == "target rocm: Radeon (gfx1100)\n"


def test_vulkan_comes_second_and_says_why_not_rocm(here, gpus, capsys):
    here(gpus=[gpus["cpu"], gpus["radeon"]], kfd=[CARD])
    assert target.resolve("auto", "auto") == ("vulkan", "rdna3:matrix=none")
    assert capsys.readouterr().err == (
        f"target vulkan: Radeon RX 7600 (RADV NAVI33) (rdna3:matrix=none); not rocm: {NO_HIP}\n"
    )
    here(gpus=[gpus["cpu"], gpus["radeon"]])
    target.resolve("auto", "native", "1")
    assert "rocm" not in capsys.readouterr().err


def test_a_gpu_without_kernels_is_left_to_vulkan(here, gpus):
    here(hip=Recorder({}, gpus=[{"gcnArchName": b"gfx803"}]), gpus=[gpus["radeon"]])
    assert target.resolve("auto", "native")[0] == "vulkan"


@pytest.mark.parametrize("cards, said", [((), ""), (({"card": "card0"},), "target cpu: no GPU")])
def test_drivers_that_run_on_the_cpu_do_not_count(here, gpus, capsys, cards, said):
    here(gpus=[gpus["cpu"]], cards=cards)
    assert target.resolve("auto", "native") == ("cpu", "native")
    shown = capsys.readouterr().err
    assert shown.startswith(said) and bool(shown) == bool(said) and shown.count("\n") <= 1


@pytest.mark.parametrize("known", [True, False])
def test_lanes_of_matrices_are_asked_for_once(here, gpus, monkeypatch, tmp_path, capsys, known):
    """With a stand-in for the driver alone, which gets the real probe."""
    asked = []

    def known_order(instance, gpu, kind, needs, step, module):
        facts = spirv_reader.read(module[0])
        matrices = "CooperativeMatrixKHR" in facts.capabilities
        asked.append((gpu.index, kind.name, facts.block, matrices, len(step["args"])))
        return known

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(lane_probe, "Instance", nullcontext)
    monkeypatch.setattr(fragments, "known_order", known_order)
    lane_probe._tell.cache_clear()
    matrices = (((16, 16, 16), ("float16", "float16", "float32", "float32")),)
    extra = {"cooperativeMatrix", "vulkanMemoryModel", "shaderFloat16"}
    radeon = replace(gpus["radeon"], matrices=matrices, features=gpus["radeon"].features | extra)
    here(gpus=[gpus["cpu"], radeon])
    profile = "rdna3" if known else "rdna3:lane_matrix=none"
    assert [target.resolve(*given) for given in (("auto", "auto"), ("vulkan", "native"))] == [("vulkan", profile)] * 2
    assert asked == [(1, "rdna3", (32, 1, 1), True, 4)]
    said = capsys.readouterr().err
    assert said.count("compiling plain kernels") == (not known) and f"({profile})" in said
    assert target.resolve("vulkan", "rdna3") == ("vulkan", "rdna3")  # what the user says is not changed
    made = VulkanTarget(profile)
    assert bool(made.archs[0].lane_matrix) == ("fragment_probe" in made.own_kernels(made.archs[0])) == known
    replaced = replace(radeon, driver_version=radeon.driver_version + 1)
    here(gpus=[replaced])
    target.resolve("vulkan", "native")
    assert len(asked) == 2


def test_a_gpu_that_lacks_features_does_not_count(here, gpus):
    here(gpus=[replace(gpus["radeon"], features=frozenset())])
    assert target.resolve("auto", "native") == ("cpu", "native")


def test_an_arch_tells_its_target(here):
    here()
    assert target.resolve("auto", "x86-64-v3") == ("cpu", "x86-64-v3")
    assert target.resolve("auto", "rdna3:matrix=none") == ("vulkan", "rdna3:matrix=none")
    assert target.resolve("auto", "gfx942") == ("rocm", "gfx942")  # no Vulkan driver has it
    with pytest.raises(UserError, match=r"--arch 7900xtx: .* --target rocm or --target vulkan"):
        target.resolve("auto", "7900xtx")
    assert target.resolve("auto", "native", "cpu") == ("cpu", "native")


def test_vulkan_on_the_cpu_is_told(here, gpus, capsys):
    here(gpus=[gpus["cpu"]])
    target.resolve("vulkan", "native")
    assert "runs on the CPU here" in capsys.readouterr().err
    here(gpus=[gpus["cpu"], gpus["radeon"]])
    assert target.resolve("vulkan", "native") == ("vulkan", "rdna3:matrix=none")
    assert capsys.readouterr().err == ""
