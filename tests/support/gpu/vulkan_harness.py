"""Runs single kernels on a Vulkan device, for kernel tests: PrimFuncs or SPIR-V on numpy arrays.

    from vulkan_harness import gpu, run
    results = run(prim_func, [a, b, c], profile="lavapipe")     # -> the arrays after the run, in the same order

Tests use Mesa's CPU driver where it is installed, unless VK_DRIVER_FILES selects others; `gpu()` skips the test where
there is no device.
"""

import ctypes
import os
from contextlib import ExitStack
from functools import cache, lru_cache
from pathlib import Path

import numpy as np
import pytest

from mlc_amd.compiler.codegen.spirv import compile_spirv
from mlc_amd.runtime.devices.vulkan.commands import CommandRecorder, VulkanLaunch
from mlc_amd.runtime.devices.vulkan.context import Context
from mlc_amd.runtime.devices.vulkan.gpu import Instance, choose
from mlc_amd.runtime.devices.vulkan.memory import ALIGN, OutOfMemory, VulkanMemory
from mlc_amd.runtime.devices.vulkan.pipelines import Pipelines
from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.gpu.base import profiles

# What runs on Mesa's CPU driver: its own profile, and one without subgroups, with workgroups of one wave.
PROFILES = {name: profiles.resolve(name) for name in ("lavapipe", "generic")}
GUARD = 4096  # bytes after each array that a kernel must leave alone


def find_driver() -> None:
    """Lets Vulkan's loader see only Mesa's CPU driver, unless the caller chose."""
    found = [
        file
        for folder in ("/usr/share", "/usr/local/share", "/etc")
        for file in Path(folder, "vulkan/icd.d").glob("lvp_icd*.json")
    ]
    if found and not os.environ.keys() & {"VK_DRIVER_FILES", "VK_ICD_FILENAMES"}:
        os.environ["VK_DRIVER_FILES"] = os.environ["VK_ICD_FILENAMES"] = str(found[0])
    os.environ.setdefault("XDG_RUNTIME_DIR", "/tmp")


find_driver()


@cache
def _open() -> Instance | UserError:
    try:
        return Instance()
    except UserError as e:
        return e


def gpu(name: str | None = None):
    """The device that tests run on (`name`: part of its name, or its number). Skips the test where there is none."""
    instance = _open()
    if isinstance(instance, UserError):
        pytest.skip(f"no Vulkan device: {instance}")
    none = {"features": [], "subgroup_size": 0, "fragments": [], "shared_memory": 0, "threads": 0, "push_constants": 0}
    return choose(instance.gpus, {"any": none}, name)[0]


def on_both(cases, some) -> list[tuple]:
    """(name of a profile, case) of all cases on the driver's own profile, and of some on the small one, whose code Mesa
    compiles slowly."""
    return [*(("lavapipe", case) for case in cases), *(("generic", case) for case in some)]


def run(func, arrays, profile="lavapipe", gpu_name: str | None = None) -> list[np.ndarray]:
    """One compiled PrimFunc on numpy arrays -> copies of all of them after the run.

    profile: a name or a Profile of schedules/gpu/base/profiles.py; its needs are checked, and a device that lacks
    something fails the test.
    """
    profile = profiles.resolve(profile) if isinstance(profile, str) else profile
    module = _module(func, profile)
    (function,) = module.functions.values()
    steps = []
    for launch in function.launches:
        kernel = module.modules[launch.symbol]
        steps.append((kernel.binary, kernel.grid, kernel.block, tuple(launch.args), tuple(kernel.writes), kernel.table))
    return run_spirv(steps, arrays, function.scratch, profile.wave if profile.subgroups else 0, profile.push, gpu_name)


@lru_cache(maxsize=8)  # tests run a kernel on several inputs, one after the other
def _module(func, profile):
    return compile_spirv({"kernel": func}, profile)


def run_spirv(
    steps, arrays, scratch=(), subgroup: int = 0, push: int = 128, gpu_name: str | None = None
) -> list[np.ndarray]:
    """Launches SPIR-V on numpy arrays, in order -> copies of them after the run.

    steps: (binary, grid, block, args, writes, table): args are indices of `arrays`, or len(arrays) + i for scratch
    buffer i (its bytes in `scratch`); writes: positions in args that the kernel writes; table: the addresses go to
    memory and their address to the kernel.
    """
    chosen, instance = gpu(gpu_name), _open()
    with ExitStack() as held:
        context = Context(instance, chosen, held)
        memory, pipelines = VulkanMemory(context), Pipelines(context, push, subgroup)
        arrays = [np.ascontiguousarray(array) for array in arrays]
        sizes = {
            i: -(-nbytes // ALIGN) * ALIGN + GUARD
            for i, nbytes in enumerate([a.nbytes for a in arrays] + list(scratch))
        }
        sizes["tables"] = 8 * sum(len(step[3]) + 32 for step in steps)
        found, blocks = memory.spread(sizes, "device")
        memory.fill(blocks)
        unwritten = [np.full(nbytes, 255, np.uint8) for nbytes in scratch]  # no numbers
        for i, array in enumerate([*arrays, *unwritten]):
            memory.put(*found[i], array.reshape(-1).view(np.uint8))
        made = pipelines.build({str(i): (step[0], tuple(step[2])) for i, step in enumerate(steps)})
        recorder = CommandRecorder(context, pipelines.layout)
        recorder.begin()
        table_at = found["tables"][1]
        for i, (_, grid, _, args, writes, table) in enumerate(steps):
            addresses = [found[arg][0].address + found[arg][1] for arg in args]
            spans = tuple(
                (a, a + sizes[arg], position in writes)
                for position, (a, arg) in enumerate(zip(addresses, args, strict=True))
            )
            values = (ctypes.c_uint64 * len(addresses))(*addresses)
            if table:
                memory.put(found["tables"][0], table_at, np.frombuffer(bytes(values), np.uint8))
                values = (ctypes.c_uint64 * 1)(found["tables"][0].address + table_at)
                table_at += -(-8 * len(addresses) // 64) * 64
            recorder.launch(VulkanLaunch(str(i), made[str(i)], tuple(grid), values, spans))
        recorder.end()
        context.submit(context.submission(recorder.commands))
        context.wait()
        results = []
        for i, array in enumerate(arrays):
            block, offset = found[i]
            raw = memory.get(block, offset, array.nbytes + GUARD)
            assert not any(raw[array.nbytes :]), f"a kernel wrote beyond the end of argument {i}"
            results.append(np.frombuffer(raw, np.uint8, array.nbytes).view(array.dtype).reshape(array.shape).copy())
        return results


class MallocState(ctypes.Structure):
    """glibc's struct mallinfo2, in bytes over all arenas."""

    NAMES = (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
    )  # fmt: skip
    _fields_ = [(name, ctypes.c_size_t) for name in NAMES]


def resident() -> int:
    """KiB of this process in memory, without what glibc holds free: one of its arenas for threads grows by a MiB a few
    times in the first thousands of steps, although no more of it is in use."""
    lines = Path("/proc/self/status").read_text().splitlines()
    total = int(next(line for line in lines if line.startswith("VmRSS")).split()[1])
    state = getattr(ctypes.CDLL(None), "mallinfo2", None)  # glibc 2.33
    if state is None:
        return total
    state.restype = MallocState
    return total - (state().fordblks >> 10)


def execute(kernel, arrays, profile):
    """Runs the kernel on the arrays of its parameters' names; they hold what it wrote afterwards."""
    names = [param.name for param in kernel.params]
    results = run(kernel, [arrays[name] for name in names], profile)
    for name, result in zip(names, results, strict=True):
        arrays[name][...] = result


def lose(device) -> None:
    """Its driver answers the next submissions as that of a GPU that was reset."""
    reset = ctypes.CFUNCTYPE(ctypes.c_int32, *[ctypes.c_void_p] * 2)(lambda *_: -4)
    reset.errcheck = device.context.calls.vkQueueSubmit.errcheck
    device.context.calls.vkQueueSubmit = lambda *_: reset(None, None)


def run_one_by_one(device, functions) -> None:
    """Runs functions of a TensorDevice on one GPU after the other, whatever they read: a driver compiles kernels when
    they run first, and those that begin at the same time would each compile all of them."""
    for function in functions:
        for number, segment in enumerate(device._segments[function]):
            for stage in device.stages:
                device._hand_over(number, segment)
                device._begin(segment, [stage])
                device._finish([stage])
    device.clear()


def short_second(monkeypatch) -> None:
    """Of the devices that are opened from now on, the second has no memory for what is as large as a cache."""
    block, seen = VulkanMemory.block, []

    def short(self, nbytes, kind):
        if self not in seen:
            seen.append(self)
        if seen.index(self) == 1 and kind == "device":
            raise OutOfMemory(nbytes, kind)
        return block(self, nbytes, kind)

    monkeypatch.setattr(VulkanMemory, "block", short)
