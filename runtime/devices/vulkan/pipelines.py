"""Builds compute pipelines of SPIR-V modules, several at a time, and keeps the driver's pipeline cache on disk.

Kernels have no descriptors: their arguments are addresses in push constants, so all pipelines share one layout. The
cache is one file for each driver version, in `$XDG_CACHE_HOME/mlc-amd` (`~/.cache/mlc-amd`). A damaged file is ignored.
"""

import contextlib
import ctypes
import hashlib
import logging
import uuid
from collections.abc import Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from mlc_amd.runtime.devices.vulkan import api
from mlc_amd.runtime.devices.vulkan.context import Context
from mlc_amd.runtime.devices.vulkan.reconvergence import reconverging
from mlc_amd.runtime.folders import cache_directory
from mlc_amd.runtime.host import available_threads

THREADS = 8  # more threads do not help: drivers hold a lock during parts of the compilation
DIGEST = 32  # bytes of the SHA-256 at the beginning of a cache file; drivers do not check the content themselves

log = logging.getLogger("mlc_amd")

_Key = TypeVar("_Key", bound=Hashable)  # by which a caller identifies a kernel


class Pipelines:
    """Builds pipelines with a common layout. push: bytes of push constants. subgroup: required size, 0 for any."""

    def __init__(self, context: Context, push: int, subgroup: int):
        self.context, self.subgroup = context, subgroup
        area = api.PushConstantRange(api.STAGE_COMPUTE, 0, push)
        info = api.LayoutInfo(rangeCount=1, ranges=ctypes.addressof(area))
        self.layout = context.own("vkDestroyPipelineLayout", context.create("vkCreatePipelineLayout", info))

    def build(
        self, kernels: dict[_Key, tuple[bytes, tuple[int, ...]]], file: Path | None = None, based: bool = False
    ) -> dict[_Key, int]:
        """{key: pipeline}. kernels: {key: (SPIR-V, size of the workgroup)}. file: of the cache, None for no cache.
        based: whether launches may begin at any workgroup. Raises VulkanError if the driver refuses a kernel."""
        known = _read(file) if file else b""
        buffer = ctypes.create_string_buffer(known, len(known))
        info = api.CacheInfo(initialSize=len(known), initialData=ctypes.addressof(buffer) if known else None)
        cache = self.context.create("vkCreatePipelineCache", info)
        try:
            with ThreadPoolExecutor(min(THREADS, available_threads())) as threads:  # waits for all, even if one fails
                jobs = {key: threads.submit(self._pipeline, cache, *kernel, based) for key, kernel in kernels.items()}
            built = {key: job.result() for key, job in jobs.items()}
            data = self._data(cache)
        finally:
            self.context.calls.vkDestroyPipelineCache(self.context.device, cache, None)
        if file and data != known:
            _write(file, data)
        return built

    def _pipeline(self, cache: int, code: bytes, block: tuple[int, ...], based: bool) -> int:
        calls, device = self.context.calls, self.context.device
        code = reconverging(code, self.context.gpu.features)
        words = ctypes.create_string_buffer(code, len(code))
        info = api.ShaderInfo(codeSize=len(code), code=ctypes.addressof(words))
        module = self.context.create("vkCreateShaderModule", info)
        # With full subgroups, the lanes of a subgroup are consecutive in x, and all of them are in use.
        full = self.subgroup and block[0] % self.subgroup == 0 and "computeFullSubgroups" in self.context.gpu.features
        size = api.RequiredSubgroupSize(size=self.subgroup) if self.subgroup else None
        full_flags = api.REQUIRE_FULL_SUBGROUPS if full else 0
        stage = api.StageInfo(next=size, flags=full_flags, stage=api.STAGE_COMPUTE, module=module, name=b"main")
        flags = api.DISPATCH_BASE if based else 0
        info = api.ComputePipelineInfo(flags=flags, stage=stage, layout=self.layout, baseIndex=-1)
        try:
            pipeline = api.create(calls.vkCreateComputePipelines, device, cache, 1, ctypes.byref(info), None)
            return self.context.own("vkDestroyPipeline", pipeline)
        finally:
            calls.vkDestroyShaderModule(device, module, None)

    def _data(self, cache: int) -> bytes:
        calls, device, size = self.context.calls, self.context.device, ctypes.c_size_t()
        calls.vkGetPipelineCacheData(device, cache, ctypes.byref(size), None)
        data = ctypes.create_string_buffer(max(size.value, 1))
        calls.vkGetPipelineCacheData(device, cache, ctypes.byref(size), data)
        return data.raw[: size.value]


class BasedPipelines:
    """Pipelines for launches that may begin at any workgroup, by symbol. Each is built at its first use. modules:
    {symbol: (SPIR-V, size of the workgroup)}. file: of the pipeline cache."""

    def __init__(self, builder: Pipelines, modules: Mapping[str, tuple[bytes, tuple[int, ...]]], file: Path):
        self._builder, self._modules, self._file = builder, modules, file
        self._built: dict[str, int] = {}

    def __getitem__(self, symbol: str) -> int:
        if symbol not in self._built:
            self._built |= self._builder.build({symbol: self._modules[symbol]}, self._file, based=True)
        return self._built[symbol]


# ---- the file


def cache_file(gpu) -> Path:
    return cache_directory() / f"pipelines-{gpu.cache_uuid.hex()}-{gpu.driver_version:x}.bin"


def _read(file: Path) -> bytes:
    """The driver's data in a cache file; empty if the file does not exist or is damaged."""
    try:
        content = file.read_bytes()
    except OSError:
        return b""
    digest, data = content[:DIGEST], content[DIGEST:]
    return data if hashlib.sha256(data).digest() == digest else b""


def _write(file: Path, data: bytes) -> None:
    temporary = file.with_name(f".{file.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(hashlib.sha256(data).digest() + data)
        temporary.replace(file)
    except OSError as e:
        log.debug("the pipelines are not cached: %s", e)
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
