"""Vulkan's C interface through ctypes: those structures, functions and enumerations that this runtime uses.

`open_loader` opens libvulkan.so.1, which every distribution has. The attributes of a `Calls` are functions with
Vulkan's names. A call that fails raises VulkanError with Vulkan's name of the error. Structures are made from the table
_STRUCTURES. Each structure with sType and pNext is a `Chained`: `Name(next=other, field=..)` sets sType and pNext, and
keeps `other` alive. (No package is used, because each of the packages for Vulkan is built for one version of Python.)
"""

import ctypes
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from mlc_amd.runtime.errors import UserError

LIBRARY = "libvulkan.so.1"
INSTALL = (
    "install your distribution's Vulkan loader: libvulkan1 (Debian, Ubuntu), vulkan-loader (Fedora), vulkan-icd-loader "
    "(Arch)"
)

# ---- enumerations

_FAILURES = """
    OUT_OF_HOST_MEMORY OUT_OF_DEVICE_MEMORY INITIALIZATION_FAILED DEVICE_LOST MEMORY_MAP_FAILED LAYER_NOT_PRESENT
    EXTENSION_NOT_PRESENT FEATURE_NOT_PRESENT INCOMPATIBLE_DRIVER TOO_MANY_OBJECTS FORMAT_NOT_SUPPORTED FRAGMENTED_POOL
    UNKNOWN
"""
RESULTS = {-number: f"VK_ERROR_{name}" for number, name in enumerate(_FAILURES.split(), 1)} | {
    -1000011001: "VK_ERROR_VALIDATION_FAILED",
    -1000069000: "VK_ERROR_OUT_OF_POOL_MEMORY",
    -1000161000: "VK_ERROR_FRAGMENTATION",
    -1000012000: "VK_ERROR_INVALID_SHADER_NV",
}
TIMEOUT = 2
_NO_MEMORY = "OUT_OF_HOST_MEMORY OUT_OF_DEVICE_MEMORY TOO_MANY_OBJECTS FRAGMENTATION"
NO_MEMORY = tuple(f"VK_ERROR_{name}" for name in _NO_MEMORY.split())
DEVICE_LOST = "VK_ERROR_DEVICE_LOST"

DEVICE_TYPES = ("other", "integrated", "discrete", "virtual", "cpu")  # VkPhysicalDeviceType
QUEUE_GRAPHICS, QUEUE_COMPUTE, QUEUE_TRANSFER = 1, 2, 4
DEVICE_LOCAL, HOST_VISIBLE, HOST_COHERENT, HOST_CACHED = 1, 2, 4, 8  # VkMemoryPropertyFlagBits
UNCACHED = 0x40 | 0x80  # also VkMemoryPropertyFlagBits: DEVICE_COHERENT_BIT_AMD, DEVICE_UNCACHED_BIT_AMD
HEAP_DEVICE_LOCAL = 1
USAGE = 0x1 | 0x2 | 0x20 | 0x20000  # all buffers: TRANSFER_SRC, TRANSFER_DST, STORAGE_BUFFER, SHADER_DEVICE_ADDRESS
ALLOCATE_DEVICE_ADDRESS = 2
HOST_ALLOCATION = 0x80  # VkExternalMemoryHandleTypeFlagBits
STAGE_COMPUTE = 0x20  # VkShaderStageFlagBits
DISPATCH_BASE = 0x10  # VkPipelineCreateFlagBits
REQUIRE_FULL_SUBGROUPS = 2  # VkPipelineShaderStageCreateFlagBits
BIND_COMPUTE = 1
# VkPipelineStageFlagBits and VkAccessFlagBits
TOP, COMPUTE, TRANSFER, BOTTOM, HOST, ALL_COMMANDS = 0x1, 0x800, 0x1000, 0x2000, 0x4000, 0x10000
SHADER_READ, SHADER_WRITE, TRANSFER_READ, TRANSFER_WRITE, HOST_READ = 0x20, 0x40, 0x800, 0x1000, 0x2000
QUERY_TIMESTAMP = 2
RESULT_64, RESULT_WAIT = 1, 2
SCOPE_SUBGROUP = 3
# VkComponentTypeKHR
COMPONENTS = ("float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
FOREVER = (1 << 64) - 1


def version(major: int, minor: int) -> int:
    return major << 22 | minor << 12


def version_text(number: int) -> str:
    return f"{number >> 22 & 127}.{number >> 12 & 1023}.{number & 4095}"


# ---- structures: "name: type field, type*count field, ..", or "name sType: .." for those that begin with sType, pNext

_TYPES: dict[str, Any] = {
    "u32": ctypes.c_uint32,  # also for flags, enumerations and VkBool32
    "i32": ctypes.c_int32,
    "u64": ctypes.c_uint64,  # also for VkDeviceSize, and handles but of instances, devices, queues and command buffers
    "f32": ctypes.c_float,
    "size": ctypes.c_size_t,
    "ptr": ctypes.c_void_p,  # also for handles of instances, devices, queues and command buffers
    "str": ctypes.c_char_p,
    "char": ctypes.c_char,
    "u8": ctypes.c_uint8,
}


class Chained(ctypes.Structure):
    """A structure that begins with sType and pNext."""

    stype = 0

    def __init__(self, next=None, **values):
        super().__init__(sType=self.stype, pNext=None if next is None else ctypes.addressof(next), **values)
        self.next = next  # a Python attribute, which keeps the next structure alive as long as this one


# Fields whose names begin with _ are not used, such as most features of VkPhysicalDeviceFeatures2 (CoreFeatures).
_STRUCTURES = """
Limits: u32*8 _0, u32 maxPushConstantsSize, u32 maxMemoryAllocationCount, u32 _1, u64*2 _2, u32*38 _3, u32
  maxComputeSharedMemorySize, u32*3 maxComputeWorkGroupCount, u32 maxComputeWorkGroupInvocations, u32*3
  maxComputeWorkGroupSize, u32*13 _4, size _5, u64*3 _6, u32*22 _7, f32 timestampPeriod, u32*12 _8, u64*2 _9, u64
  nonCoherentAtomSize
Properties: u32 apiVersion, u32 driverVersion, u32 vendorID, u32 deviceID, u32 deviceType, char*256 deviceName, u8*16
  pipelineCacheUUID, Limits limits, u32*5 sparse
MemoryType: u32 propertyFlags, u32 heapIndex
MemoryHeap: u64 size, u32 flags
MemoryProperties: u32 memoryTypeCount, MemoryType*32 memoryTypes, u32 memoryHeapCount, MemoryHeap*16 memoryHeaps
QueueFamily: u32 queueFlags, u32 queueCount, u32 timestampValidBits, u32*3 granularity
Extension: char*256 extensionName, u32 specVersion
MemoryRequirements: u64 size, u64 alignment, u32 memoryTypeBits
PushConstantRange: u32 stageFlags, u32 offset, u32 size
BufferCopy: u64 srcOffset, u64 dstOffset, u64 size
Properties2 1000059001: Properties properties
MemoryProperties2 1000059006: MemoryProperties memoryProperties
MemoryBudget 1000237000: u64*16 heapBudget, u64*16 heapUsage
SubgroupProperties 1000094000: u32 subgroupSize, u32 supportedStages, u32 supportedOperations, u32 quad
Maintenance3Properties 1000168000: u32 maxPerSetDescriptors, u64 maxMemoryAllocationSize
Maintenance4Properties 1000413001: u64 maxBufferSize
DriverProperties 1000196000: u32 driverID, char*256 driverName, char*256 driverInfo, u8*4 conformance
PciProperties 1000212000: u32 pciDomain, u32 pciBus, u32 pciDevice, u32 pciFunction
SubgroupSizeProperties 1000225000: u32 minSubgroupSize, u32 maxSubgroupSize, u32 maxComputeWorkgroupSubgroups, u32
  requiredSubgroupSizeStages
DotProperties 1000280001: u32*4 _0, u32 integerDotProduct4x8BitPackedSignedAccelerated, u32*25 _1
MatrixProperties 1000506001: u32 MSize, u32 NSize, u32 KSize, u32 AType, u32 BType, u32 CType, u32 ResultType, u32
  saturatingAccumulation, u32 scope
CoreFeatures 1000059000: u32*40 _0, u32 shaderInt64, u32 shaderInt16, u32*13 _1
Storage16Features 1000083000: u32 storageBuffer16BitAccess, u32*3 _0
Storage8Features 1000177000: u32 storageBuffer8BitAccess, u32*2 _0
SmallFeatures 1000082000: u32 shaderFloat16, u32 shaderInt8
AddressFeatures 1000257000: u32 bufferDeviceAddress, u32*2 _0
MemoryModelFeatures 1000211000: u32 vulkanMemoryModel, u32 vulkanMemoryModelDeviceScope, u32 _0
DotFeatures 1000280000: u32 shaderIntegerDotProduct
SubgroupSizeFeatures 1000225002: u32 subgroupSizeControl, u32 computeFullSubgroups
MatrixFeatures 1000506000: u32 cooperativeMatrix, u32 _0
UncachedFeatures 1000229000: u32 deviceCoherentMemory
UniformFlowFeatures 1000323000: u32 shaderSubgroupUniformControlFlow
ReconvergenceFeatures 1000434000: u32 shaderMaximalReconvergence
ApplicationInfo 0: str name, u32 version, str engine, u32 engineVersion, u32 apiVersion
InstanceInfo 1: u32 flags, ptr application, u32 layerCount, ptr layers, u32 extensionCount, ptr extensions
QueueInfo 2: u32 flags, u32 family, u32 count, ptr priorities
DeviceInfo 3: u32 flags, u32 queueCount, ptr queues, u32 layerCount, ptr layers, u32 extensionCount, ptr extensions, ptr
  features
SubmitInfo 4: u32 waitCount, ptr waits, ptr waitStages, u32 commandCount, ptr commands, u32 signalCount, ptr signals
AllocateInfo 5: u64 allocationSize, u32 memoryTypeIndex
SemaphoreInfo 9: u32 flags
MappedRange 6: u64 memory, u64 offset, u64 size
FenceInfo 8: u32 flags
QueryPoolInfo 11: u32 flags, u32 queryType, u32 queryCount, u32 statistics
BufferInfo 12: u32 flags, u64 size, u32 usage, u32 sharing, u32 familyCount, ptr families
ShaderInfo 16: u32 flags, size codeSize, ptr code
CacheInfo 17: u32 flags, size initialSize, ptr initialData
StageInfo 18: u32 flags, u32 stage, u64 module, str name, ptr specialization
ComputePipelineInfo 29: u32 flags, StageInfo stage, u64 layout, u64 base, i32 baseIndex
LayoutInfo 30: u32 flags, u32 setCount, ptr sets, u32 rangeCount, ptr ranges
ExternalBuffer 1000072000: u32 handleTypes
ImportedHost 1000178000: u32 handleType, ptr address
HostProperties 1000178001: u32 memoryTypeBits
CommandPoolInfo 39: u32 flags, u32 family
CommandBufferInfo 40: u64 pool, u32 level, u32 count
BeginInfo 42: u32 flags, ptr inheritance
MemoryBarrier 46: u32 source, u32 destination
AllocateFlagsInfo 1000060000: u32 flags, u32 deviceMask
AddressInfo 1000244001: u64 buffer
RequiredSubgroupSize 1000225001: u32 size
"""


def _entries(text: str) -> Iterator[tuple[str, str]]:
    """(text before the colon, text after it) of each entry of a table. Continuation lines of an entry are indented."""
    for entry in text.strip().replace("\n  ", " ").split("\n"):
        head, _, rest = entry.partition(": ")
        yield head, rest


def _define(head: str, items: str) -> None:
    """Makes a structure of an entry of _STRUCTURES, as an attribute of this module."""
    name, _, stype = head.partition(" ")
    fields = [("sType", ctypes.c_uint32), ("pNext", ctypes.c_void_p)] if stype else []
    for item in items.split(","):
        kind, field = item.split()
        kind, _, count = kind.partition("*")
        fields.append((field, _TYPES[kind] * int(count) if count else _TYPES[kind]))
    attributes = {"_fields_": fields, "stype": int(stype)} if stype else {"_fields_": fields}
    _TYPES[name] = globals()[name] = type(name, (Chained if stype else ctypes.Structure,), attributes)


for _entry in _entries(_STRUCTURES):
    _define(*_entry)

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...


def names_of(structure: Any) -> list[str]:
    """The names of the fields of a `Chained` but sType and pNext."""
    return [name for name, *_ in structure._fields_[2:]]


# ---- functions, grouped by types: "*result argument ..: names"; without *result the function returns a VkResult


def _functions(text: str) -> dict[str, str]:
    return {name: arguments for arguments, names in _entries(text) for name in names.split()}


GLOBAL = {"vkCreateInstance": "ptr ptr ptr"}
MATRICES = {"vkGetPhysicalDeviceCooperativeMatrixPropertiesKHR": "ptr ptr ptr"}
IMPORT = {"vkGetMemoryHostPointerPropertiesEXT": "ptr u32 ptr ptr"}
INSTANCE = _functions("""
*void ptr ptr: vkDestroyInstance vkGetPhysicalDeviceProperties2 vkGetPhysicalDeviceFeatures2
  vkGetPhysicalDeviceMemoryProperties2
ptr ptr ptr: vkEnumeratePhysicalDevices
*void ptr ptr ptr: vkGetPhysicalDeviceQueueFamilyProperties
ptr str ptr ptr: vkEnumerateDeviceExtensionProperties
ptr ptr ptr ptr: vkCreateDevice
*ptr ptr str: vkGetDeviceProcAddr
""")
DEVICE = _functions("""
*void ptr ptr: vkDestroyDevice
*void ptr u32 u32 ptr: vkGetDeviceQueue
ptr: vkDeviceWaitIdle vkEndCommandBuffer
ptr u32 ptr u64: vkQueueSubmit
ptr ptr ptr ptr: vkCreateFence vkCreateBuffer vkAllocateMemory vkCreateShaderModule vkCreatePipelineLayout
  vkCreatePipelineCache vkCreateCommandPool vkCreateQueryPool vkCreateSemaphore
*void ptr u64 ptr: vkDestroyFence vkDestroyBuffer vkGetBufferMemoryRequirements vkFreeMemory vkDestroyShaderModule
  vkDestroyPipelineLayout vkDestroyPipelineCache vkDestroyPipeline vkDestroyCommandPool vkDestroyQueryPool
  vkDestroySemaphore
ptr u32 ptr: vkResetFences vkInvalidateMappedMemoryRanges
ptr u32 ptr u32 u64: vkWaitForFences
*u64 ptr ptr: vkGetBufferDeviceAddress
ptr u64 u64 u64: vkBindBufferMemory
ptr u64 u64 u64 u32 ptr: vkMapMemory
ptr u64 ptr ptr: vkGetPipelineCacheData
ptr u64 u32 ptr ptr ptr: vkCreateComputePipelines
ptr ptr ptr: vkAllocateCommandBuffers
*void ptr u64 u32 ptr: vkFreeCommandBuffers
ptr ptr: vkBeginCommandBuffer
*void ptr u32 u64: vkCmdBindPipeline
*void ptr u64 u32 u32 u32 ptr: vkCmdPushConstants
*void ptr u32 u32 u32: vkCmdDispatch
*void ptr u32 u32 u32 u32 u32 u32: vkCmdDispatchBase
*void ptr u32 u32 u32 u32 ptr u32 ptr u32 ptr: vkCmdPipelineBarrier
*void ptr u64 u64 u32 ptr: vkCmdCopyBuffer
*void ptr u64 u64 u64 u32: vkCmdFillBuffer
*void ptr u64 u32 u32: vkCmdResetQueryPool
*void ptr u32 u64 u32: vkCmdWriteTimestamp
ptr u64 u32 u32 size ptr u64 u32: vkGetQueryPoolResults
""")


class VulkanError(RuntimeError):
    """A call failed. call: the function's name; code: Vulkan's name of the error, such as "VK_ERROR_DEVICE_LOST"."""

    def __init__(self, call: str, code: str):
        super().__init__(f"{call} failed: {code}")
        self.call, self.code = call, code


def _checked(name: str):
    def check(result, function, arguments):
        if result < 0:
            raise VulkanError(name, RESULTS.get(result, str(result)))
        return result

    return check


class Calls:
    """The functions of a table, as attributes. `lookup(name)` returns a function's address. Raises VulkanError if a
    function does not exist."""

    def __init__(self, lookup, table: dict[str, str]):
        for name, text in table.items():
            first, _, rest = text.partition(" ") if text[0] == "*" else ("*i32", "", text)
            result = None if first == "*void" else _TYPES[first[1:]]
            address = lookup(name.encode())
            if not address:
                raise VulkanError(name, "VK_ERROR_INCOMPATIBLE_DRIVER")
            function = ctypes.CFUNCTYPE(result, *(_TYPES[kind] for kind in rest.split()))(address)
            if result is ctypes.c_int32:
                function.errcheck = _checked(name)
            setattr(self, name, function)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Callable[..., Any]: ...


def listed(call, kind: Any, *arguments) -> list:
    """All items of an enumerating function. It is called twice: for the number of items, then for the items."""
    count = ctypes.c_uint32()
    call(*arguments, ctypes.byref(count), None)
    whole = kind * count.value
    items = whole(*(kind() for _ in range(count.value))) if issubclass(kind, Chained) else whole()
    call(*arguments, ctypes.byref(count), items)
    return list(items)[: count.value]


def create(call, *arguments, kind: Any = ctypes.c_uint64) -> int:
    """Calls a function such as vkCreate.., and returns the handle that it writes to its last argument."""
    handle = kind()
    call(*arguments, ctypes.byref(handle))
    return handle.value


def strings(texts) -> ctypes.Array:
    return (ctypes.c_char_p * len(texts))(*(text.encode() for text in texts))


def open_loader():
    """(vkGetInstanceProcAddr, `Calls` of functions without an instance). Raises UserError without a Vulkan loader."""
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError as e:
        raise UserError(f"cannot load Vulkan's loader {LIBRARY} ({e}); {INSTALL}") from e
    get = library.vkGetInstanceProcAddr
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_char_p]
    return get, Calls(lambda name: get(None, name), GLOBAL)
