"""The Vulkan GPUs of this machine, their features and limits, and the choice of one for an artifact.

`Instance` keeps Vulkan open. `missing(gpu, needs)` lists what a GPU lacks for an artifact, `choose` returns one.
"""

import ctypes
import os
from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlc_amd.runtime.closing import Closing
from mlc_amd.runtime.devices.choice import selected
from mlc_amd.runtime.devices.vulkan import api, drivers
from mlc_amd.runtime.devices.vulkan.profile import profile_of
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.host import join_group

# Structure of features: (version of Vulkan that includes it or None, extension that has it in earlier versions).
FEATURES = {
    api.Storage16Features: (api.version(1, 1), "VK_KHR_16bit_storage"),
    api.Storage8Features: (api.version(1, 2), "VK_KHR_8bit_storage"),
    api.SmallFeatures: (api.version(1, 2), "VK_KHR_shader_float16_int8"),
    api.AddressFeatures: (api.version(1, 2), "VK_KHR_buffer_device_address"),
    api.MemoryModelFeatures: (api.version(1, 2), "VK_KHR_vulkan_memory_model"),
    api.DotFeatures: (api.version(1, 3), "VK_KHR_shader_integer_dot_product"),
    api.SubgroupSizeFeatures: (api.version(1, 3), "VK_EXT_subgroup_size_control"),
    api.UncachedFeatures: (None, "VK_AMD_device_coherent_memory"),
    api.MatrixFeatures: (None, "VK_KHR_cooperative_matrix"),
    api.UniformFlowFeatures: (None, "VK_KHR_shader_subgroup_uniform_control_flow"),
    api.ReconvergenceFeatures: (None, "VK_KHR_shader_maximal_reconvergence"),
}
# The same table for structures of properties.
PROPERTIES = {
    api.SubgroupProperties: (api.version(1, 1), ""),
    api.Maintenance3Properties: (api.version(1, 1), ""),
    api.DriverProperties: (api.version(1, 2), "VK_KHR_driver_properties"),
    api.Maintenance4Properties: (api.version(1, 3), "VK_KHR_maintenance4"),
    api.DotProperties: (api.version(1, 3), "VK_KHR_shader_integer_dot_product"),
    api.SubgroupSizeProperties: (api.version(1, 3), "VK_EXT_subgroup_size_control"),
    api.PciProperties: (None, "VK_EXT_pci_bus_info"),
}
BUDGET, HOST_MEMORY = "VK_EXT_memory_budget", "VK_EXT_external_memory_host"
OLDEST = api.version(1, 1)  # older devices have none of these structures, and are ignored
RANK = {"discrete": 0, "integrated": 1, "virtual": 2, "other": 3, "cpu": 4}  # order of preference of device types
NO_DRIVER = (
    "no Vulkan driver is installed: install mesa-vulkan-drivers (Debian, Ubuntu, Fedora) or vulkan-radeon (Arch) for "
    "AMD GPUs, "
    "the vendor's driver for others"
)


@dataclass(frozen=True)
class Heap:
    """A memory heap, in bytes. free: what this process may still allocate; `size` if the driver does not report it."""

    size: int
    free: int
    device_local: bool


@dataclass(frozen=True)
class VulkanGpu:
    """One device as Vulkan reports it."""

    index: int
    name: str
    type: str  # of api.DEVICE_TYPES
    pci: str | None  # address as in /sys/bus/pci/devices; "" where the driver does not report it, None of a CPU
    vendor: int
    device: int
    driver: str  # the driver's own text for its name and version
    driver_id: int
    driver_version: int
    api: int
    features: frozenset[str]  # the features of FEATURES that it has, by Vulkan's names
    extensions: frozenset[str]
    # Upper limits: shared_memory (bytes of LDS of a workgroup), threads (invocations of a workgroup), push_constants
    # (bytes), groups (workgroups of a launch in x, y, z), allocation and buffer (bytes of one), allocations (their
    # number). non_coherent: nonCoherentAtomSize in bytes. tick: ns of a unit of timestamps.
    limits: dict
    subgroup: tuple[int, int, int]  # subgroup (wave) sizes: (default, smallest, largest)
    full: bool  # whether a compute pipeline can require a subgroup size
    subgroup_operations: int  # VkSubgroupFeatureFlags
    dot: bool  # whether signed 4x8-bit dot products are accelerated
    matrices: tuple[tuple, ...]  # ((m, n, k), (types of A, B, C, result)) of subgroup-scope cooperative matrices
    heaps: tuple[Heap, ...]
    memory: tuple[tuple[int, int], ...]  # (property flags, heap) of each memory type
    queue: tuple[int, int] | None  # (family, valid bits of its timestamps) of the queue that computes
    copy_queues: tuple[tuple[int, int], ...]  # (family, index in it) of two more queues for copies; () without such
    cache_uuid: bytes = field(repr=False)

    @property
    def unified(self) -> bool:
        """Whether its memory is the host's. The device type tells, but for virtual machines' devices: these are unified
        if all heaps are device-local, because a discrete GPU also has a heap of host memory."""
        if self.type in ("virtual", "other"):
            return all(heap.device_local for heap in self.heaps)
        return self.type in ("integrated", "cpu")

    @property
    def float16_matrices(self) -> list[tuple[int, int, int]]:
        """(m, n, k) of its cooperative matrices with float16 A and B and float32 C and result."""
        return [shape for shape, types in self.matrices if types == ("float16", "float16", "float32", "float32")]


class Instance(Closing):
    """An open Vulkan instance. gpus: its devices; handles: by `VulkanGpu.index`, the handle of each physical device. It
    is a context manager; `close` may be called twice. Raises UserError without a loader, a driver or a device."""

    def __init__(self):
        get, library = api.open_loader()
        application = api.ApplicationInfo(name=b"mlc-amd", apiVersion=api.version(1, 3))
        info = api.InstanceInfo(application=ctypes.addressof(application))
        try:
            self.handle = api.create(library.vkCreateInstance, ctypes.byref(info), None, kind=ctypes.c_void_p)
        except api.VulkanError as e:
            if e.code == "VK_ERROR_INCOMPATIBLE_DRIVER":
                raise UserError(_no_driver()) from e
            raise UserError(
                f"Vulkan does not start ({e.code}); check it with vulkaninfo, of the package vulkan-tools"
            ) from e
        self._held = ExitStack()
        try:
            self.calls = api.Calls(lambda name: get(self.handle, name), api.INSTANCE)
            self._held.callback(self.calls.vkDestroyInstance, self.handle, None)
            self._get = get
            self.handles = api.listed(self.calls.vkEnumeratePhysicalDevices, ctypes.c_void_p, self.handle)
            self.gpus = [gpu for index, handle in enumerate(self.handles) if (gpu := self._gpu(index, handle))]
            if not self.gpus:
                raise UserError(_no_device())
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._held.close()

    def features(self, handle: int, structures) -> list[ctypes.Structure]:
        """The features of a physical device, as chained structures: CoreFeatures, then those of `structures`."""
        chain = _chain(structures)
        core = api.CoreFeatures(next=chain[0] if chain else None)
        self.calls.vkGetPhysicalDeviceFeatures2(handle, ctypes.byref(core))
        return [core, *chain]

    def budget(self, handle: int, budget: bool) -> tuple[Any, list[int]]:
        """(memory properties of a device, bytes of each heap that this process may still allocate). budget: whether the
        device has the extension BUDGET; without it, the sizes of heaps are returned."""
        extra = api.MemoryBudget()
        found = api.MemoryProperties2(next=extra if budget else None)
        self.calls.vkGetPhysicalDeviceMemoryProperties2(handle, ctypes.byref(found))
        memory = found.memoryProperties
        heaps = range(memory.memoryHeapCount)
        if not budget:
            return memory, [memory.memoryHeaps[i].size for i in heaps]
        return memory, [max(extra.heapBudget[i] - extra.heapUsage[i], 0) for i in heaps]

    def _gpu(self, index: int, handle: int) -> VulkanGpu | None:
        calls = self.calls
        extensions = frozenset(
            item.extensionName.decode()
            for item in api.listed(calls.vkEnumerateDeviceExtensionProperties, api.Extension, handle, None)
        )
        plain = api.Properties2()
        calls.vkGetPhysicalDeviceProperties2(handle, ctypes.byref(plain))
        version = plain.properties.apiVersion
        if version < OLDEST:
            return None
        chain = _chain(offered(PROPERTIES, version, extensions))
        top = api.Properties2(next=chain[0])
        calls.vkGetPhysicalDeviceProperties2(handle, ctypes.byref(top))
        facts = {name: getattr(part, name) for part in chain for name in api.names_of(type(part))}
        features = frozenset(
            name
            for part in self.features(handle, offered(FEATURES, version, extensions))
            for name in api.names_of(type(part))
            if name[0] != "_" and getattr(part, name)
        )
        properties, limits = top.properties, top.properties.limits
        memory, free = self.budget(handle, BUDGET in extensions)
        allocation = facts["maxMemoryAllocationSize"]
        names = (facts.get(name, b"") for name in ("driverName", "driverInfo"))
        driver = b" ".join(names).decode(errors="replace").strip()
        default, device_type = facts["subgroupSize"], api.DEVICE_TYPES[properties.deviceType]
        return VulkanGpu(
            index=index,
            name=properties.deviceName.decode(errors="replace"),
            type=device_type,
            pci=None if device_type == "cpu" else _pci(facts),
            vendor=properties.vendorID,
            device=properties.deviceID,
            driver=driver,
            driver_id=facts.get("driverID", 0),
            driver_version=properties.driverVersion,
            api=version,
            features=features,
            extensions=extensions,
            limits={
                "shared_memory": limits.maxComputeSharedMemorySize,
                "threads": min(limits.maxComputeWorkGroupInvocations, limits.maxComputeWorkGroupSize[0]),
                "push_constants": limits.maxPushConstantsSize,
                "groups": tuple(limits.maxComputeWorkGroupCount),
                "allocation": allocation,
                "buffer": facts.get("maxBufferSize", allocation),
                "allocations": limits.maxMemoryAllocationCount,
                "non_coherent": limits.nonCoherentAtomSize,
                "tick": limits.timestampPeriod,
            },
            subgroup=(default, facts.get("minSubgroupSize", default), facts.get("maxSubgroupSize", default)),
            full=bool(facts.get("requiredSubgroupSizeStages", 0) & api.STAGE_COMPUTE),
            subgroup_operations=facts["supportedOperations"],
            dot=bool(facts.get("integerDotProduct4x8BitPackedSignedAccelerated")),
            matrices=self._matrices(handle) if "cooperativeMatrix" in features else (),
            heaps=tuple(
                Heap(heap.size, left, bool(heap.flags & api.HEAP_DEVICE_LOCAL))
                for heap, left in zip(memory.memoryHeaps, free, strict=False)
            ),
            memory=tuple((kind.propertyFlags, kind.heapIndex) for kind in memory.memoryTypes[: memory.memoryTypeCount]),
            queue=(queue := _queue(families := self._families(handle))),
            copy_queues=_copy_queues(families, queue[0]) if queue else (),
            cache_uuid=bytes(properties.pipelineCacheUUID),
        )

    def _matrices(self, handle: int) -> tuple[tuple, ...]:
        (name,) = api.MATRICES
        function = getattr(api.Calls(lambda name: self._get(self.handle, name), api.MATRICES), name)
        rows = [
            row
            for row in api.listed(function, api.MatrixProperties, handle)
            if row.scope == api.SCOPE_SUBGROUP and not row.saturatingAccumulation
        ]
        kinds = dict(enumerate(api.COMPONENTS))
        return tuple(
            (
                (r.MSize, r.NSize, r.KSize),
                tuple(kinds.get(kind, "other") for kind in (r.AType, r.BType, r.CType, r.ResultType)),
            )
            for r in rows
        )

    def _families(self, handle: int) -> list[tuple[int, Any]]:
        enumerate_families = self.calls.vkGetPhysicalDeviceQueueFamilyProperties
        return list(enumerate(api.listed(enumerate_families, api.QueueFamily, handle)))


def _queue(families: list[tuple[int, Any]]) -> tuple[int, int] | None:
    """(family, valid bits of timestamps) of the queue family for computing: one with timestamps, and without graphics
    if possible, as long kernels on a graphics queue would block the desktop."""
    usable = [(i, family) for i, family in families if family.queueFlags & api.QUEUE_COMPUTE]
    usable.sort(key=lambda item: (item[1].timestampValidBits == 0, item[1].queueFlags & api.QUEUE_GRAPHICS))
    return (usable[0][0], usable[0][1].timestampValidBits) if usable else None


def _copy_queues(families: list[tuple[int, Any]], computes: int) -> tuple[tuple[int, int], ...]:
    """(family, index) of two queues for copies: of a family that only copies (it uses the GPU's copy engines),
    otherwise of the family that computes. () if there are none."""
    engines = api.QUEUE_COMPUTE | api.QUEUE_GRAPHICS
    for i, family in families:
        if family.queueFlags & (engines | api.QUEUE_TRANSFER) == api.QUEUE_TRANSFER and family.queueCount > 1:
            return (i, 0), (i, 1)
    enough = dict(families)[computes].queueCount > 2
    return ((computes, 1), (computes, 2)) if enough else ()


def offered(table: dict, version: int, extensions: Collection[str]) -> list[type]:
    """The structures of a table (FEATURES, PROPERTIES) that a device supports. version: the device's Vulkan version."""
    found = table.items()
    return [kind for kind, (since, name) in found if (since is not None and version >= since) or name in extensions]


def _pci(facts: dict[str, int]) -> str:
    """The PCI address from the fields of PciProperties; "" without these."""
    names = ("pciDomain", "pciBus", "pciDevice", "pciFunction")
    return "{:04x}:{:02x}:{:02x}.{:x}".format(*(facts[name] for name in names)) if names[0] in facts else ""


def _chain(kinds) -> list[ctypes.Structure]:
    """One structure of each kind, each pointing to the next."""
    chain = []
    for kind in reversed(list(kinds)):
        chain.insert(0, kind(next=chain[0] if chain else None))
    return chain


def _no_driver() -> str:
    """The message if no driver starts."""
    failed = drivers.failures()
    return f"{failed[0]}; see `mlc-amd doctor`" if failed else NO_DRIVER


def _no_device(nodes: Path = Path("/dev/dri")) -> str:
    """The message if drivers start, but find no device."""
    blocked = [node for node in sorted(nodes.glob("renderD*")) if not os.access(node, os.R_OK | os.W_OK)]
    if blocked:
        return f"no Vulkan device: no permission on {blocked[0]}; {join_group(blocked[0])}"
    if not nodes.exists():
        return (
            f"no Vulkan device and no {nodes}: check that the GPU's kernel driver is loaded; in a container, pass "
            f"--device {nodes}"
        )
    return f"no Vulkan device: the installed drivers support no GPU of this machine; {NO_DRIVER.partition(': ')[2]}"


def list_gpus() -> list[VulkanGpu]:
    """The devices that Vulkan reports. Raises UserError if there is no loader, no driver or no device."""
    with Instance() as instance:
        return instance.gpus


# ---- choice of a GPU


def missing(gpu: VulkanGpu, needs: dict) -> list[str]:
    """What a GPU lacks to run kernels with these needs (`Profile.needs`, in the manifest), as phrases for a message;
    empty if it can run them."""
    lacks = [name for name in needs["features"] if name not in gpu.features]
    size = needs["subgroup_size"]
    if size and not (gpu.full and gpu.subgroup[1] <= size <= gpu.subgroup[2]):
        lacks.append(f"subgroups of {size}")
    for fragment in needs["fragments"]:
        if tuple(fragment) not in gpu.float16_matrices:
            lacks.append(f"cooperative matrices of {'x'.join(map(str, fragment))}")
    units = {
        "shared_memory": "{} bytes of shared memory",
        "threads": "workgroups of {}",
        "push_constants": "{} bytes of push constants",
    }
    lacks += [text.format(needs[name]) for name, text in units.items() if gpu.limits[name] < needs[name]]
    return lacks if gpu.queue else [*lacks, "a compute queue"]


def preferred(gpus: list[VulkanGpu], wanted: str | None = None) -> list[VulkanGpu]:
    """The GPUs that the user selects, the best first. wanted: see `choice.selected`. Raises UserError for none."""
    order = sorted(
        gpus, key=lambda gpu: (RANK[gpu.type], -sum(heap.size for heap in gpu.heaps if heap.device_local), gpu.index)
    )
    return selected(order, wanted, "Vulkan")


def choose(gpus: list[VulkanGpu], needs: dict[str, dict], wanted: str | None = None) -> tuple[VulkanGpu, str]:
    """(GPU, profile of the artifact to run on it). needs: {profile: needs} of the artifact, the preferred profile
    first. wanted: see `preferred`. Raises UserError if no GPU can run any of the profiles."""
    order = preferred(gpus, wanted)
    for gpu in order:
        for profile, needed in needs.items():
            if not missing(gpu, needed):
                return gpu, profile
    profile = next(iter(needs))
    lacks = "; ".join(f"{gpu.name} ({gpu.driver}) lacks {', '.join(missing(gpu, needs[profile]))}" for gpu in order)
    raise UserError(
        f"this model was compiled for {', '.join(needs)}: {lacks}; update the driver, or compile the model with "
        f"--target vulkan --arch {profile_of(order[0])}"
    )


def profile_here(wanted: str | None = None) -> str:
    """`profile_of` the GPU on which a model would run if it were compiled now. wanted: see `preferred`. Raises
    UserError if there is no GPU."""
    return profile_of(preferred(list_gpus(), wanted)[0])
