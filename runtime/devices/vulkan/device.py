"""The device of target vulkan: runs the SPIR-V kernels of an artifact (dist/README.md) on a GPU with a Vulkan driver.

Each function of the plan is recorded when the model is loaded, and submitted for every run (replays.py). On a unified
GPU (it works in the host's memory) there is one copy of the weights. On other GPUs, experts may stay in host memory
(n_cpu_moe).
"""

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import numpy as np

from mlc_amd.runtime.artifact.io_names import launches_before_late
from mlc_amd.runtime.artifact.memory import RING, gib, host_shortage, of_manifest, on_host, shortage
from mlc_amd.runtime.artifact.weight_block import byte_count
from mlc_amd.runtime.cache.cache_types import kv_bytes, kv_types, page_parts
from mlc_amd.runtime.cache.kv_pool import ONE_SEQUENCE, KvSize
from mlc_amd.runtime.devices.choice import selection
from mlc_amd.runtime.devices.handover import Handover, takes_turns
from mlc_amd.runtime.devices.pieces import Pacer
from mlc_amd.runtime.devices.placement import Range, chunks, cut, parts, read_in_place
from mlc_amd.runtime.devices.run_queue import QueuedDevice, RunQueue
from mlc_amd.runtime.devices.vulkan import api, fragments, timing
from mlc_amd.runtime.devices.vulkan.carried import Carried
from mlc_amd.runtime.devices.vulkan.commands import VulkanLaunch, prepare
from mlc_amd.runtime.devices.vulkan.context import Context
from mlc_amd.runtime.devices.vulkan.gpu import Instance, choose
from mlc_amd.runtime.devices.vulkan.io import Io
from mlc_amd.runtime.devices.vulkan.memory import (
    ALIGN,
    BLOCK,
    BlockPart,
    MemoryBlock,
    OutOfMemory,
    VulkanMemory,
    places,
)
from mlc_amd.runtime.devices.vulkan.pipelines import BasedPipelines, Pipelines, cache_file
from mlc_amd.runtime.devices.vulkan.profile import without_lanes
from mlc_amd.runtime.devices.vulkan.replays import Replays
from mlc_amd.runtime.errors import MachineError, UserError
from mlc_amd.runtime.gpus import DEVICE_KINDS

CLOSED = "this device is closed; load the model again"

log = logging.getLogger("mlc_amd")


class _Usable:
    """A context for code that uses the device. After an error of Vulkan the device is unusable: the context closes it,
    and raises what `VulkanDevice.failure` returns. It is a class, because a generator's overhead would exceed the time
    of the code inside."""

    def __init__(self, device: "VulkanDevice", doing: str):
        self._device, self._doing = device, doing

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind, error, trace) -> None:
        if isinstance(error, (api.VulkanError, OutOfMemory)):
            raise self._device.failure(error, self._doing) from error


class VulkanDevice(QueuedDevice):
    """See runtime/devices/__init__.py for the protocol. threads: ignored, it is for target cpu. index: the number of a
    GPU, or a part of its name. n_cpu_moe: the experts of so many first layers stay in host memory, where the GPU reads
    them across the bus; ignored for unified GPUs. kv: the size of the KV cache. Raises UserError if this machine cannot
    run the artifact.
    """

    kind = "vulkan"

    def __init__(
        self,
        artifact,
        threads: int | None = None,
        index: str | int | None = None,
        n_cpu_moe: int = 0,
        kv: KvSize = ONE_SEQUENCE,
    ):
        self.artifact, self.manifest = artifact, artifact.manifest
        self.kv_types = kv_types(artifact.manifest)
        self.threads = 1  # host threads that compute
        self._held = ExitStack()  # owns all Vulkan objects, and destroys them in reverse order
        self.close = weakref.finalize(self, self._held.close)  # also at interpreter exit
        self._n_cpu_moe, self._kv_size = n_cpu_moe, kv
        self._boxes: dict[str, tuple[int, int]] = {}
        try:
            self._open(None if index is None else str(index))
            self._allocate()
            self._upload()
            self.clear()
            if not self.manifest.get("inline"):  # otherwise `exchange_through` records, as launches need its addresses
                self._record()
            self.context.idle_first()
        except (api.VulkanError, OutOfMemory) as e:
            raise self.failure(e, "loading the model") from e
        except BaseException:
            self.close()
            raise

    def _open(self, index: str | None) -> None:
        instance = Instance()
        self._held.callback(instance.close)
        target = self.manifest["target"]
        needs = {profile: target["needs"][profile] for profile in target["archs"]}
        self.gpu, self.code_arch = choose(instance.gpus, needs, index)
        self.name = f"{self.gpu.name} ({self.code_arch})"
        self.on_host = self.gpu.type == "cpu"
        if self.gpu.type == "cpu" and not selection(index):
            log.warning(
                "no GPU that can run this model: %s runs on the CPU, slowly; see `mlc-amd doctor`", self.gpu.name
            )
        self.context = Context(instance, self.gpu, self._held, copies=takes_turns(self.manifest["functions"]))
        self.memory = VulkanMemory(self.context)
        self._kernels = self.manifest["launches"][self.code_arch]
        self._build(needs[self.code_arch])

    def _module(self, step: dict) -> tuple[bytes, tuple[int, ...]]:
        """(SPIR-V, size of the workgroup) of a launch's kernel."""
        offset, nbytes = step["code"]
        return self._code[offset : offset + nbytes], tuple(step["block"])

    def _build(self, needs: dict) -> None:
        """Makes the pipelines of all kernels. needs: of the artifact's profile, as in the manifest."""
        self._code = (self.artifact.path / self.manifest["libraries"][self.code_arch]).read_bytes()
        modules = {step["symbol"]: self._module(step) for kernel in self._kernels.values() for step in kernel["steps"]}
        builder = Pipelines(self.context, needs["push_constants"], needs["subgroup_size"])
        try:
            self._pipelines = builder.build(modules, cache_file(self.gpu))
        except api.VulkanError as e:
            if e.code in (*api.NO_MEMORY, api.DEVICE_LOST):
                raise
            raise UserError(
                f"the driver {self.gpu.driver} cannot build the kernels for {self.code_arch} ({e.code}); update it, "
                "or compile the model "
                "with --arch generic"
            ) from e
        self._layout, self._based = builder.layout, BasedPipelines(builder, modules, cache_file(self.gpu))
        if "fragment_probe" in self._kernels:
            (step,) = self._kernels["fragment_probe"]["steps"]
            kind = DEVICE_KINDS.get(self.code_arch.partition(":")[0])
            instance = self.context.instance
            if not fragments.known_order(instance, self.gpu, kind, needs, step, self._module(step)):
                raise UserError(
                    f"the driver {self.gpu.driver} distributes cooperative matrices in another way than these kernels "
                    f"expect; compile the model with --arch {without_lanes(self.code_arch)}"
                )

    # ---- memory

    def _allocate(self) -> None:
        manifest, memory, weights = self.manifest, self.memory, self.artifact.weights
        host = frozenset() if self.gpu.unified else on_host(manifest["tensors"], self._n_cpu_moe)
        self._ranges = cut(weights.places, min(BLOCK, memory.limit), host)
        scratch = max((self._scratch_bytes(function) for function in manifest["functions"].values()), default=0)
        self._weights: dict[Range, tuple[MemoryBlock, int]] = {}
        for kind, at_host in (("device", False), ("host", True)):
            sizes = {one: one.nbytes for one in self._ranges if one.host == at_host}
            self._weights |= memory.spread(sizes, kind)[0] if sizes else {}
        self._weights_at = {
            name: (self._weights[one][0].address + self._weights[one][1] + first - one.begin, nbytes)
            for name, (at, nbytes) in weights.places.items()
            for one, first, _ in parts(self._ranges, at, nbytes)
        }
        self._arena = memory.block(max(manifest["arena_bytes"], ALIGN), "device")
        self._scratch = memory.block(max(scratch, ALIGN), "device")
        self.io = Io(self.context, memory, manifest["io"])
        self.kv_types = kv_types(manifest, self._kv_size.pages(manifest, memory.left(), memory.limit))
        self._kv_bytes = {name: byte_count(dtype, shape) for name, (shape, dtype) in self.kv_types.items()}
        self._kv, self._kv_blocks = memory.spread(self._kv_bytes, "device")
        # Zeroed because a NaN in uninitialized memory would spread from unused rows to results.
        memory.fill([self._arena, self._scratch, *self.io.blocks])

    def _scratch_bytes(self, function: dict) -> int:
        """The bytes of scratch memory of a function: RING times the largest amount that one of its kernels needs, so
        that RING kernels can run at the same time."""
        sizes = [self._kernels[call["kernel"]]["scratch"] for call in function["launches"]]
        needs = (places(dict(enumerate(buffers)), api.FOREVER)[1][0] for buffers in sizes)
        return RING * max(needs, default=0)

    def _upload(self) -> None:
        """Loads the weights. Blocks that are mapped are read in place. Others are filled through staging memory: the
        host reads a chunk while the GPU copies the chunk before."""
        weights, in_place = self.artifact.weights, []
        for one, first, last in chunks(self._ranges):
            block, offset = self._weights[one]
            if block.host is not None:
                in_place.append((first, block.view(offset + first - one.begin, np.uint8, (last - first,))))
            else:
                self.memory.load(block, offset + first - one.begin, last - first, partial(weights.read, first))
        read_in_place(weights, in_place)
        self.artifact.release_weights()

    # ---- recording

    def _record(self) -> None:
        functions = self.manifest["functions"]
        plan = {name: self._bind(function) for name, function in functions.items()}
        heads = {name: launches_before_late(function, self._kernels) or 0 for name, function in functions.items()}
        self.pacer = Pacer(self.manifest, self.code_arch, cuts=True)
        carried = Carried(self.context, self.memory, self._arena, functions)
        self._replays = Replays(
            self.context, self.io, self.pacer, functions, plan, heads, self._layout, self._based, carried
        )
        self._queue = RunQueue(self._replays, self.pacer, heads)

    def _bind(self, function: dict) -> list[VulkanLaunch]:
        """All launches of a function, in order."""
        launches, ring, ring_end = [], 0, self._scratch_bytes(function)
        tables: list[tuple[VulkanLaunch, list[int]]] = []
        for call in function["launches"]:
            kernel = self._kernels[call["kernel"]]
            offsets, (nbytes,) = places(dict(enumerate(kernel["scratch"])), api.FOREVER)
            ring = ring if ring + nbytes <= ring_end else 0
            base, ring = self._scratch.address + ring, ring + nbytes
            spans = [self._span(arg, function) for arg in call["args"]]
            spans += [(base + offset, base + offset + kernel["scratch"][i]) for i, (_, offset) in offsets.items()]
            for step in kernel["steps"]:
                launches.append(self._launch(call["kernel"], step, [spans[i] for i in step["args"]]))
                if step["table"]:
                    tables.append((launches[-1], [spans[i][0] for i in step["args"]]))
        self._write_tables(tables)
        return launches

    def _launch(self, kernel: str, step: dict, spans: list[tuple[int, int]]) -> VulkanLaunch:
        if any(count > most for count, most in zip(step["grid"], self.gpu.limits["groups"], strict=True)):
            grid = "x".join(map(str, step["grid"]))
            raise UserError(
                f"{self.gpu.name} cannot launch {grid} workgroups, as {kernel} needs; compile the model for another "
                "--arch"
            )
        return prepare(kernel, self._pipelines[step["symbol"]], step, spans, 0 if step["table"] else None)

    def _write_tables(self, tables: list[tuple[VulkanLaunch, list[int]]]) -> None:
        """Writes the tables of addresses of kernels with many arguments, in one block. tables: (launch, addresses)."""
        if not tables:
            return
        sizes = {i: 8 * len(addresses) for i, (_, addresses) in enumerate(tables)}
        found, (block,) = self.memory.spread(sizes, "device")
        content = np.zeros(block.nbytes, np.uint8)
        for i, (launch, addresses) in enumerate(tables):
            offset = found[i][1]
            content[offset : offset + 8 * len(addresses)] = np.array(addresses, np.uint64).view(np.uint8)
            launch.push[0] = block.address + offset
        self.memory.put(block, 0, content)

    def _span(self, arg: list, function: dict) -> tuple[int, int]:
        """(address, end) of an argument of a call in the plan; dist/README.md lists the kinds of arguments."""
        kind, where = arg[0], arg[1]
        if kind == "box":
            return self._boxes[where]
        if kind == "weight":
            address, count = self._weights_at[where]
        elif kind == "arena":
            address, count = self._arena.address + where, byte_count(arg[2], arg[3])
        else:
            block, offset = (self._kv if kind == "kv" else self.io.places)[where]
            count = self._kv_bytes[where] if kind == "kv" else self.io.byte_count(where, function)
            address = block.address + offset
        return address, address + count

    # ---- the protocol

    def write(self, name: str, values) -> None:
        self._alive()
        self.io.write(name, values)
        self.pacer.write(name, values)

    def fill(self, name: str, rows: int, put: Callable[[np.ndarray], None]) -> None:
        self._alive()
        self.io.fill(name, rows, put)

    def connect(self, before: Handover | None, after: Handover | None) -> None:
        with self._usable("loading the model"):
            self._replays.carried.connect(before, after)
            self.context.idle_first()

    def exchange_through(self, boxes: Mapping[str, int]) -> Iterator[None]:
        """See the protocol. It starts no step: the iterator is empty."""
        with self._usable("loading the model"):
            self._boxes = {name: (address, address + 1) for name, address in boxes.items()}
            self._record()
            self.context.idle_first()
        return iter(())

    def hand_over(self, received: int, sent: int) -> None:
        self._replays.carried.parts = received, sent

    def _run_alone(self, function: str, plain: bool) -> Iterator[None]:
        return self._replays.run(function, plain)

    def read(self, name: str, rows: int, first: int = 0) -> np.ndarray:
        with self._usable(f"reading {name}"):
            return self.io.read(name, rows)[first:]

    def clear(self) -> None:
        with self._usable("clearing the cache"):
            self.memory.fill(self._kv_blocks)

    def page_parts(self, span: int) -> list[tuple[str, int]]:
        return page_parts(self.manifest, span)

    def _page_places(self, span: int, pages: Sequence[int]) -> list[BlockPart]:
        """The parts of the KV cache's blocks that these pages consist of, page by page."""
        parts = [(*self._kv[name], count) for name, count in self.page_parts(span)]
        return [(block, offset + page * count, count) for page in pages for block, offset, count in parts]

    def read_pages(self, span: int, pages: Sequence[int]) -> np.ndarray:
        with self._usable("reading the cache"):
            contents = self.memory.gather(self._page_places(span, pages)) if self.page_parts(span) else b""
            return np.frombuffer(contents, np.uint8).reshape(len(pages), -1)

    def write_pages(self, span: int, pages: Sequence[int], contents: np.ndarray) -> None:
        with self._usable("writing the cache"):
            if contents.size:
                self.memory.scatter(self._page_places(span, pages), contents.reshape(-1))

    def page_memory(self, span: int, count: int) -> np.ndarray:
        with self._usable("allocating memory"):
            nbytes = sum(nbytes for _, nbytes in self.page_parts(span))
            return self.memory.shared(count * nbytes).reshape(count, nbytes)

    def time(self, function: str, meanwhile: Callable[[], None] | None = None) -> list[tuple[str, float, float]]:
        """See `Replays.time`. Raises UserError if the driver has no timestamps."""
        self._alive()
        if not self.context.clock_bits:
            raise UserError(f"{self.gpu.name} cannot time kernels: its driver has no timestamps for compute queues")
        with self._usable(f"running {function}"):
            self._queue.settle()
            return self._replays.time(function, meanwhile)

    def copy_bandwidth(self) -> float:
        """See the protocol: that of the artifact's copy kernel. 0.0 without timestamps, or without enough memory."""
        self._alive()
        if not self.context.clock_bits:
            return 0.0
        target, (step,) = self.manifest["target"], self._kernels["copy"]["steps"]
        needs = target["needs"][self.code_arch]
        return timing.copy_bandwidth(self.context, target["copy_bytes"], needs, step, self._module(step))

    # ---- errors

    def _usable(self, doing: str) -> "_Usable":
        self._alive()
        return _Usable(self, doing)

    def _alive(self) -> None:
        if not self.close.alive:
            raise MachineError(CLOSED)

    def failure(self, error: api.VulkanError | OutOfMemory, doing: str) -> Exception:
        """Closes the device after an error that makes it unusable. Returns the exception to raise: a MachineError if
        the user can do something about it, otherwise the error itself. doing: for the message."""
        message = None
        if isinstance(error, OutOfMemory):
            message = self._out_of_memory(error.nbytes, error.kind)
        elif error.code in api.NO_MEMORY:
            message = self._out_of_memory(0, "device")
        elif error.code == api.DEVICE_LOST:
            message = (
                f"GPU {self.gpu.index}, {self.gpu.name}, was reset while {doing} ({error}): a kernel ran too long, the "
                "driver failed, or another program crashed it; load the model again, and if that happens again, update "
                "the driver and see the kernel log (dmesg)"
            )
        self.close()
        return MachineError(message) if message else error

    def _out_of_memory(self, wanted: int, kind: str) -> str:
        """The message for a failed allocation of `wanted` bytes of memory of a kind."""
        limit, needs = self.memory.limit, replace(of_manifest(self.manifest), kv=kv_bytes(self.kv_types))
        needs = needs.in_host_memory() if self.gpu.unified else needs
        if wanted > limit:
            return (
                f"this model needs {gib(wanted)} in one piece, and {self.gpu.driver} allows {gib(limit)} at most; "
                "compile with a smaller --ctx"
            )
        if kind == "host":
            return host_shortage(needs, self._n_cpu_moe)
        free = sum(heap.free for heap in self.gpu.heaps if self.gpu.unified or heap.device_local)
        return shortage(needs, free, self.gpu.name, self._n_cpu_moe, self._kv_size != ONE_SEQUENCE)
