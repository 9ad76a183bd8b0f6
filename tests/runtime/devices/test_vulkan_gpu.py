"""Which Vulkan GPU runs an artifact, which profile fits it, which memory it is given, and what is said where there is
none.

What drivers of real GPUs tell is here as data, put into the description of the device that is here.
"""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import vulkan_harness

from mlc_amd.runtime.devices.vulkan import api
from mlc_amd.runtime.devices.vulkan.gpu import Heap, Instance, VulkanGpu, choose, list_gpus, missing, profile_of
from mlc_amd.runtime.devices.vulkan.memory import KINDS, VulkanMemory
from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.gpu.base import profiles


@pytest.fixture(scope="module", autouse=True)
def lavapipe() -> VulkanGpu:
    return vulkan_harness.gpu()


@pytest.fixture(autouse=True)
def no_variable(monkeypatch):
    monkeypatch.delenv("MLC_AMD_DEVICE", raising=False)


FLOAT16 = ("float16", "float16", "float32", "float32")
MATRICES = (((16, 16, 16), FLOAT16),)
AMD, NVIDIA, INTEL = 0x1002, 0x10DE, 0x8086
PRODUCTS = [  # facts as their drivers tell them; AMD's where no vendor is given
    ("vangogh", {"name": "AMD Custom GPU 0405 (RADV VANGOGH)", "device": 0x163F, "subgroup": (64, 32, 64),
    "dot": True}),
    ("vangogh", {"name": "AMD Custom GPU 0932", "device": 0x1435, "subgroup": (64, 32, 64), "dot": True}),
    ("rdna2", {"name": "AMD Radeon RX 6800 XT (RADV NAVI21)", "subgroup": (64, 32, 64), "dot": True}),
    ("rdna2", {"name": "AMD Radeon(TM) Graphics (RADV RAPHAEL_MENDOCINO)", "subgroup": (64, 32, 64), "dot": True}),
    ("rdna2:dot=none", {"name": "AMD Radeon RX 5700 (RADV NAVI10)", "subgroup": (64, 32, 64)}),
    ("rdna3", {"name": "AMD Radeon RX 7900 XTX (RADV NAVI31)", "subgroup": (64, 32, 64), "dot": True,
    "matrices": MATRICES}),
    ("rdna3:matrix=none", {"name": "AMD Radeon 780M (RADV PHOENIX)", "subgroup": (64, 32, 64), "dot": True}),
    ("rdna3:dot=none+matrix=none", {"name": "AMD Radeon 780M (RADV PHOENIX)", "subgroup": (64, 32, 64)}),
    ("rdna3", {"name": "AMD Radeon RX 7900 XTX", "subgroup": (64, 32, 64), "dot": True, "matrices": MATRICES}),
    ("rdna4", {"name": "AMD Radeon RX 9070 XT (RADV GFX1201)", "subgroup": (64, 32, 64), "dot": True,
    "matrices": MATRICES}),
    ("gfx90c", {"name": "AMD Radeon Graphics (RADV RENOIR)", "subgroup": (64, 64, 64)}),
    ("nvidia", {"vendor": NVIDIA, "name": "NVIDIA H200", "subgroup": (32, 32, 32), "dot": True,
    "matrices": (*MATRICES, ((16, 8, 16), FLOAT16))}),
    ("nvidia:lane_matrix=none", {"vendor": NVIDIA, "name": "NVIDIA", "subgroup": (32, 32, 32), "dot": True,
    "matrices": MATRICES}),
    ("nvidia:matrix=none", {"vendor": NVIDIA, "name": "NVIDIA GeForce GTX 1660", "subgroup": (32, 32, 32),
    "dot": True}),
    ("generic", {"vendor": INTEL, "name": "Intel(R) Arc(tm) A770 Graphics (DG2)", "subgroup": (32, 8, 32),
    "dot": True}),
    ("generic", {"name": "AMD Radeon RX 580 (RADV POLARIS10)", "subgroup": (64, 64, 64), "features": frozenset()}),
]  # fmt: skip


@pytest.mark.parametrize(
    "profile, facts", PRODUCTS, ids=lambda value: value if isinstance(value, str) else value["name"]
)
def test_profile_of_products(lavapipe, profile, facts):
    gpu = replace(lavapipe, **({"vendor": AMD, "driver_id": 3} | facts))
    assert profile_of(gpu) == profile
    gpu = replace(
        gpu,
        features=gpu.features | {"cooperativeMatrix"},
        limits=gpu.limits | {"shared_memory": 65536, "push_constants": 256},
    )
    assert profile == "generic" or not missing(gpu, profiles.resolve(profile).needs)


def test_profile_of_mesas_cpu_driver(lavapipe):
    assert (
        profile_of(replace(lavapipe, matrices=()))
        == f"lavapipe{'' if lavapipe.subgroup[0] == 8 else f':wave={lavapipe.subgroup[0]}'}"
    )
    matrices = (((8, 8, 8), FLOAT16),)
    assert profile_of(replace(lavapipe, subgroup=(8, 8, 8), matrices=matrices)) == "lavapipe:matrix=8x8x8"
    assert profile_of(replace(lavapipe, subgroup=(4, 4, 4), matrices=())) == "generic"


def test_profile_with_several_changes(lavapipe):
    facts = {"name": "AMD Radeon RX 7900 XTX (RADV NAVI31)", "subgroup": (64, 64, 64), "dot": False, "matrices": ()}
    gpu = replace(lavapipe, vendor=AMD, driver_id=3, **facts)
    name = profile_of(gpu)
    assert name == "rdna3:wave=64+dot=none+matrix=none"
    profile = profiles.resolve(name)
    assert (profile.wave, profile.dot, profile.matrix) == (64, "", "")
    assert not missing(replace(gpu, limits=gpu.limits | {"shared_memory": 65536, "push_constants": 256}), profile.needs)


def gpus(lavapipe) -> list[VulkanGpu]:
    big = (Heap(8 << 30, 8 << 30, True),)
    return [
        replace(lavapipe, index=0, name="llvmpipe", type="cpu"),
        replace(
            lavapipe,
            index=1,
            name="AMD Custom GPU 0405 (RADV VANGOGH)",
            type="integrated",
            heaps=big,
            subgroup=(64, 32, 64),
        ),
        replace(
            lavapipe,
            index=2,
            name="AMD Radeon RX 580",
            type="discrete",
            heaps=big,
            features=lavapipe.features - {"shaderFloat16"},
        ),
        replace(lavapipe, index=3, name="AMD Radeon RX 6800", type="discrete", heaps=big, subgroup=(64, 32, 64)),
    ]


NEEDS = {
    "generic": {
        "features": [],
        "subgroup_size": 0,
        "fragments": [],
        "shared_memory": 0,
        "threads": 32,
        "push_constants": 128,
    },
}
NEEDS = {"vangogh": NEEDS["generic"] | {"features": ["shaderFloat16"], "subgroup_size": 32, "threads": 256}, **NEEDS}


def test_the_choice(lavapipe, monkeypatch):
    here, first = gpus(lavapipe), {"vangogh": NEEDS["vangogh"]}
    assert choose(here, first)[0].index == 3  # discrete before integrated, and the other discrete one lacks something
    assert choose(here[:3], first)[0].index == 1
    assert choose(here[:1], NEEDS) == (here[0], "generic")  # subgroups of 8 only
    assert choose(here, NEEDS)[1] == "generic"  # 2 comes before 3 of the same size, and it runs the second profile
    assert choose(here, NEEDS, "3") == (here[3], "vangogh")
    assert choose(here, NEEDS, "custom gpu") == (here[1], "vangogh")
    assert choose(here, NEEDS, "580") == (here[2], "generic")
    monkeypatch.setenv("MLC_AMD_DEVICE", "1")
    assert choose(here, NEEDS)[0].index == 1
    assert choose(here, NEEDS, "0")[0].index == 0  # the flag counts more


def test_errors_of_the_choice(lavapipe, monkeypatch):
    here = gpus(lavapipe)
    with pytest.raises(UserError, match="--device 9: no such Vulkan device here; there are 0: llvmpipe, 1: AMD Custom"):
        choose(here, NEEDS, "9")
    with pytest.raises(UserError, match="--device 58: no such"):  # digits of the RX 580
        choose(here, NEEDS, "58")
    monkeypatch.setenv("MLC_AMD_DEVICE", "geforce")
    with pytest.raises(UserError, match="MLC_AMD_DEVICE geforce: no such"):
        choose(here, NEEDS)
    monkeypatch.delenv("MLC_AMD_DEVICE")
    with pytest.raises(
        UserError, match=r"for vangogh: AMD Radeon RX 580 .* lacks shaderFloat16, subgroups of 32; update the driver"
    ):
        choose([here[2]], {"vangogh": NEEDS["vangogh"]})
    limits = NEEDS["generic"] | {
        "shared_memory": 1 << 20,
        "threads": 4096,
        "push_constants": 512,
        "fragments": [[16, 16, 16]],
    }
    with pytest.raises(
        UserError, match="matrices of 16x16x16, 1048576 bytes of shared memory, workgroups of 4096, 512 bytes of push"
    ):
        choose(here[:1], {"generic": limits})


def test_memory_types(lavapipe):
    """RADV on the Steam Deck, on a card with resizable BAR, and NVIDIA without: which memory each kind of block gets
    first."""
    local, mapped, cached = api.DEVICE_LOCAL, api.HOST_VISIBLE | api.HOST_COHERENT, api.HOST_CACHED
    radv = ((local, 1), (mapped, 0), (local | mapped, 1), (mapped | cached, 0), (local | 0xC0, 1))
    without_bar = ((local, 0), (mapped, 1), (mapped | cached, 1))
    with Instance() as instance:
        context = type("Context", (), {"instance": instance, "gpu": None})

        def first(memory, type, kind):
            context.gpu = replace(lavapipe, memory=memory, type=type)
            of = VulkanMemory(context)
            return of._types(KINDS[kind][of.gpu.unified], 0xFF)

        assert first(radv, "integrated", "device") == [2, 1, 3]
        assert first(radv, "discrete", "device") == [0, 2]
        assert first(radv, "discrete", "input")[0] == 2
        assert first(radv, "discrete", "output")[0] == 3
        assert first(without_bar, "discrete", "device") == [0]
        assert first(without_bar, "discrete", "input")[0] == 1
        assert first(radv, "discrete", "inbox") == [2] and first(radv, "discrete", "outbox") == [3]
        uncached = (*radv, (local | mapped | 0xC0, 1), (mapped | cached | 0xC0, 0))
        assert first(uncached, "discrete", "inbox") == [5, 2] and first(uncached, "discrete", "outbox") == [6, 3]
        assert first(uncached, "discrete", "input")[0] == 2
        assert first(without_bar, "discrete", "inbox") == []
        assert first(radv, "discrete", "host") == [1, 3]  # never the card's own, and uncached before cached
        assert first(without_bar, "discrete", "host") == [1, 2]
        assert first(((local | mapped | cached, 0),), "discrete", "host") == []


def test_no_loader(monkeypatch):
    monkeypatch.setattr(api, "LIBRARY", "libvulkan-that-is-not-here.so.1")
    with pytest.raises(
        UserError, match=r"cannot load Vulkan's loader .*; install your distribution's Vulkan loader: libvulkan1"
    ):
        list_gpus()


def test_no_driver():
    code = (
        "from mlc_amd.runtime.devices.vulkan.gpu import list_gpus\nfrom mlc_amd.runtime.errors import UserError\n"
        "try: list_gpus()\nexcept UserError as e: print(e)"
    )
    named = {"VK_DRIVER_FILES": "/nothing.json", "VK_ICD_FILENAMES": "/nothing.json"}
    assert "/nothing.json does not start: the file cannot be read" in _output(code, named)
    empty = dict.fromkeys(("VK_DRIVER_FILES", "VK_ICD_FILENAMES"), "")
    empty |= dict.fromkeys(("HOME", "XDG_DATA_HOME", "XDG_DATA_DIRS", "XDG_CONFIG_HOME", "XDG_CONFIG_DIRS"), "/nothing")
    assert "no Vulkan driver is installed: install mesa-vulkan-drivers" in _output(code, empty)


def _output(code: str, variables: dict[str, str]) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | variables, timeout=300
    ).stdout
