"""Parts of the vulkan device that need no driver: structures, hazards, places in memory."""

import ctypes

from mlc_amd.runtime.devices.vulkan import api
from mlc_amd.runtime.devices.vulkan.commands import Hazards
from mlc_amd.runtime.devices.vulkan.memory import places


def test_structures_have_the_sizes_of_vulkans_headers():
    sizes = {
        api.Limits: 504, api.Properties: 824, api.MemoryProperties: 520, api.CoreFeatures: 240, api.MemoryBudget: 272,
        api.DotProperties: 136, api.DriverProperties: 536, api.MatrixProperties: 56, api.DeviceInfo: 72,
        api.InstanceInfo: 64,
        api.SubmitInfo: 72, api.BufferInfo: 56, api.StageInfo: 48, api.ComputePipelineInfo: 96, api.LayoutInfo: 48,
    }  # fmt: skip
    assert {kind.__name__: ctypes.sizeof(kind) for kind in sizes} == {
        kind.__name__: size for kind, size in sizes.items()
    }
    assert (api.Limits.maxComputeSharedMemorySize.offset, api.Limits.timestampPeriod.offset) == (216, 424)


def test_hazards():
    seen = Hazards()
    seen.add([(0, 64, False), (64, 128, True)])
    assert not seen.clash([(0, 64, False), (128, 256, True)])  # reads after reads, and writes elsewhere
    assert seen.clash([(100, 101, False)])  # read after write
    assert seen.clash([(127, 300, True)])  # write after write
    assert seen.clash([(63, 64, True)])  # write after read
    seen.clear()
    assert not seen.clash([(63, 200, True)])


def test_places():
    found, blocks = places({"a": 1, "b": 256, "c": 300, "d": 2000}, 1024)
    assert found == {"a": (0, 0), "b": (0, 256), "c": (0, 512), "d": (1, 0)}
    assert blocks == [1024, 2048]
