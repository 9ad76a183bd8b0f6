"""The child process of `radv`: lets the Vulkan driver that the environment chose compile shaders, and reports
statistics.

In: a JSON list of shaders on stdin (name, code in base64, block, push, wave). Out: JSON lines on stdout: {"device"},
then for each shader {"statistics": {name: number}, "assembly"} or {"error"}. If there is no such driver, it ends with
status UNUSABLE and a message. It is a process of its own because the driver may abort. Nothing runs on the device:
there is no GPU.
"""

import base64
import ctypes
import json
import os
import resource
import sys
from ctypes import addressof, byref

from mlc_amd.runtime.devices.vulkan import api
from mlc_amd.runtime.errors import UserError

UNUSABLE = 3
FAMILY = "RADV_FORCE_FAMILY"  # the driver's environment variable: the GPU to compile for
EXTENSION, MATRICES = "VK_KHR_pipeline_executable_properties", "VK_KHR_cooperative_matrix"
CAPTURE = 0x40 | 0x80  # VkPipelineCreateFlagBits: CAPTURE_STATISTICS, CAPTURE_INTERNAL_REPRESENTATIONS
RADV = 3  # VkDriverId
ASSEMBLY = b"Assembly"  # RADV's name for the text that contains the ISA
CALLS = {
    "vkGetPipelineExecutableStatisticsKHR": "ptr ptr ptr ptr",
    "vkGetPipelineExecutableInternalRepresentationsKHR": "ptr ptr ptr ptr",
}


def _chained(structure, stype, /, **fields):
    members = [("sType", ctypes.c_uint32), ("pNext", ctypes.c_void_p), *fields.items()]
    return type(structure, (api.Chained,), {"_fields_": members, "stype": stype})


_TEXT, _U32 = ctypes.c_char * 256, ctypes.c_uint32
ExecutableFeatures = _chained("ExecutableFeatures", 1000269000, pipelineExecutableInfo=_U32)
ExecutableInfo = _chained("ExecutableInfo", 1000269003, pipeline=ctypes.c_uint64, index=_U32)
# value: a union of VkBool32, int64, uint64 and double; RADV's numbers are all uint64
Statistic = _chained("Statistic", 1000269004, name=_TEXT, description=_TEXT, format=_U32, value=ctypes.c_uint64)
Representation = _chained(
    "Representation", 1000269005, name=_TEXT, description=_TEXT, text=_U32, size=ctypes.c_size_t, data=ctypes.c_void_p
)
FEATURES = (
    api.Storage16Features, api.Storage8Features, api.SmallFeatures, api.AddressFeatures, api.MemoryModelFeatures,
    api.DotFeatures, api.SubgroupSizeFeatures, api.MatrixFeatures, ExecutableFeatures,
)  # fmt: skip


class Compiler:
    """A logical device on RADV's GPU of the family `family`. Raises UserError if there is none. name: the GPU's name
    and the driver's version."""

    def __init__(self, family: str):
        get, loader = api.open_loader()
        application = api.ApplicationInfo(apiVersion=api.version(1, 3))
        info = api.InstanceInfo(application=addressof(application))
        instance = api.create(loader.vkCreateInstance, byref(info), None, kind=ctypes.c_void_p)
        calls = api.Calls(lambda name: get(instance, name), api.INSTANCE)
        gpu, self.name = self._find(calls, instance, family)
        found = api.listed(lambda *rest: calls.vkEnumerateDeviceExtensionProperties(gpu, None, *rest), api.Extension)
        offered = {extension.extensionName.decode() for extension in found}
        if EXTENSION not in offered:
            raise UserError(f"the driver has no {EXTENSION}")
        self.device = self._device(calls, gpu, sorted(offered & {EXTENSION, MATRICES}))
        self.calls = api.Calls(lambda name: calls.vkGetDeviceProcAddr(self.device, name), api.DEVICE | CALLS)

    @staticmethod
    def _find(calls, instance, family):
        names = []
        for gpu in api.listed(calls.vkEnumeratePhysicalDevices, ctypes.c_void_p, instance):
            driver = api.DriverProperties()
            properties = api.Properties2(next=driver)
            calls.vkGetPhysicalDeviceProperties2(gpu, byref(properties))
            names.append(properties.properties.deviceName.decode())
            if driver.driverID == RADV and f"RADV {family}" in names[-1]:
                return gpu, f"{names[-1]}, {driver.driverInfo.decode()}"
        raise UserError(f"it has {', '.join(names) or 'no GPU'}")

    @staticmethod
    def _device(calls, gpu, extensions):
        features = None
        for kind in FEATURES:
            features = kind(next=features)
        features = api.CoreFeatures(next=features)
        calls.vkGetPhysicalDeviceFeatures2(gpu, byref(features))
        features._0[0] = 0  # robustBufferAccess off, as it changes code; all other available features stay on
        priority, names = ctypes.c_float(1), api.strings(extensions)
        queue = api.QueueInfo(family=0, count=1, priorities=addressof(priority))
        enabled = {"extensionCount": len(extensions), "extensions": addressof(names)}
        info = api.DeviceInfo(next=features, queueCount=1, queues=addressof(queue), **enabled)
        return api.create(calls.vkCreateDevice, gpu, byref(info), None, kind=ctypes.c_void_p)

    def compile(self, code: bytes, block: list[int], push: int, wave: int) -> dict:
        """{"statistics", "assembly"} of one SPIR-V module. Raises VulkanError if the driver refuses it."""
        words = ctypes.create_string_buffer(code, len(code))
        module = self._create("vkCreateShaderModule", api.ShaderInfo(codeSize=len(code), code=addressof(words)))
        pushed = api.PushConstantRange(stageFlags=api.STAGE_COMPUTE, size=push)
        layout = self._create("vkCreatePipelineLayout", api.LayoutInfo(rangeCount=1, ranges=addressof(pushed)))
        full = api.REQUIRE_FULL_SUBGROUPS if block[0] % wave == 0 else 0
        size = api.RequiredSubgroupSize(size=wave)
        stage = api.StageInfo(next=size, flags=full, stage=api.STAGE_COMPUTE, module=module, name=b"main")
        info = api.ComputePipelineInfo(flags=CAPTURE, stage=stage, layout=layout, baseIndex=-1)
        pipeline = api.create(self.calls.vkCreateComputePipelines, self.device, 0, 1, byref(info), None)
        of = ExecutableInfo(pipeline=pipeline, index=0)
        found = api.listed(self.calls.vkGetPipelineExecutableStatisticsKHR, Statistic, self.device, byref(of))
        answer = {"statistics": {item.name.decode(): item.value for item in found}, "assembly": self._assembly(of)}
        self.calls.vkDestroyPipeline(self.device, pipeline, None)
        self.calls.vkDestroyPipelineLayout(self.device, layout, None)
        self.calls.vkDestroyShaderModule(self.device, module, None)
        return answer

    def _assembly(self, of) -> str:
        """The ISA text, or "". The driver is queried three times: for the number of texts, their lengths, the texts."""
        call, count = self.calls.vkGetPipelineExecutableInternalRepresentationsKHR, ctypes.c_uint32()
        call(self.device, byref(of), byref(count), None)
        items = (Representation * count.value)(*(Representation() for _ in range(count.value)))
        call(self.device, byref(of), byref(count), items)
        texts = [ctypes.create_string_buffer(max(item.size, 1)) for item in items]
        for item, text in zip(items, texts, strict=True):
            item.data = addressof(text)
        call(self.device, byref(of), byref(count), items)
        found = (text for item, text in zip(items, texts, strict=True) if item.name == ASSEMBLY)
        return next((text.value.decode(errors="replace") for text in found), "")

    def _create(self, call: str, info) -> int:
        return api.create(getattr(self.calls, call), self.device, byref(info), None)


def main() -> int:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Answers go to the original stdout. File descriptor 1 becomes stderr, as the driver may print to it.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(content: dict) -> None:
        print(json.dumps(content), file=answers, flush=True)

    try:
        compiler = Compiler(os.environ[FAMILY])
    except (UserError, api.VulkanError) as error:
        print(error, file=sys.stderr)
        return UNUSABLE
    answer({"device": compiler.name})
    for shader in json.load(sys.stdin):
        try:
            answer(compiler.compile(base64.b64decode(shader["code"]), shader["block"], shader["push"], shader["wave"]))
        except api.VulkanError as error:
            answer({"error": str(error)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
