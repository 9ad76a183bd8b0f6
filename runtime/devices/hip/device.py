"""The device of target rocm: runs the code objects of an artifact (dist/README.md) on an AMD GPU, on one stream.

The launches of each function are captured once in a HIP graph, which is replayed for each run. Some drivers replay
stale data (ROCm/hip issues 3887 and 3902). So a few steps are computed with and without graphs when the model is
loaded; if results differ, the device logs a warning and uses no graphs. MLC_AMD_GRAPH=0 disables graphs.

Steps that are too long for one submission are launched without graphs, with waits between their pieces (pieces.py). All
others go through a queue (runs.py).
"""

import logging
import os
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np

from mlc_amd.runtime.artifact.io_names import ENCODED, launches_before_late
from mlc_amd.runtime.artifact.manifest import is_encoder
from mlc_amd.runtime.cache.cache_types import page_parts
from mlc_amd.runtime.cache.kv_pool import ONE_SEQUENCE, KvSize
from mlc_amd.runtime.cache.sequence import ChunkRows
from mlc_amd.runtime.devices.handover import Handover
from mlc_amd.runtime.devices.hip import code_objects
from mlc_amd.runtime.devices.hip import launches as launching
from mlc_amd.runtime.devices.hip.api import CANNOT_LOAD, Hip, HipError, open_bindings, runtime_version
from mlc_amd.runtime.devices.hip.carried import HipCarried
from mlc_amd.runtime.devices.hip.diagnosis import OVERRIDE
from mlc_amd.runtime.devices.hip.gpu import choose
from mlc_amd.runtime.devices.hip.launches import HipLaunch
from mlc_amd.runtime.devices.hip.memory import HipMemory
from mlc_amd.runtime.devices.hip.runs import HipRuns
from mlc_amd.runtime.devices.pieces import Pacer, WorkPiece
from mlc_amd.runtime.devices.run_queue import QueuedDevice, RunQueue
from mlc_amd.runtime.devices.steps import write_private_pages, write_step
from mlc_amd.runtime.errors import MachineError, UserError
from mlc_amd.runtime.host import kfd_gpus

CHECK_STEPS = 3  # replays that are compared with launches; stale data shows up from the second replay on
GRAPH_VARIABLE = "MLC_AMD_GRAPH"

_NO_GRAPHS = "HIP graphs do not work with this driver (%s); continuing without them, which is slower"

log = logging.getLogger("mlc_amd")


class HipDevice(QueuedDevice):
    """See runtime/devices/__init__.py for the protocol. threads: ignored, it is for target cpu. index: the number of a
    GPU, or a part of its name. n_cpu_moe: the experts of so many first layers stay in host memory, where the GPU reads
    them across the bus; ignored for an APU. kv: the size of the KV cache. bindings: a substitute for AMD's package.
    Raises UserError if this machine cannot run the artifact."""

    kind, on_host = "rocm", False

    def __init__(
        self,
        artifact,
        threads: int | None = None,
        index: str | None = None,
        n_cpu_moe: int = 0,
        kv: KvSize = ONE_SEQUENCE,
        bindings=None,
    ):
        self.artifact, self.manifest = artifact, artifact.manifest
        self.threads = 1  # host threads that compute
        self._held = ExitStack()  # owns all HIP resources, and releases them in reverse order
        self.close = weakref.finalize(self, self._held.close)  # also at interpreter exit, while the library is loaded
        self.hip = Hip(open_bindings() if bindings is None else bindings)
        self.version = runtime_version(self.hip.names)
        self.gpu, self.code_arch = choose(self.hip, self.manifest["libraries"], index)
        self.name = f"{self.gpu.name} ({self.gpu.arch}{self._override()})"
        self.hip("hipSetDevice", self.gpu.index)
        self.stream = self.hip.stream(self._held)
        self._load_kernels()
        scratch = {name: kernel["scratch"] for name, kernel in self._kernels.items()}
        experts = 0 if self.gpu.integrated else n_cpu_moe
        try:
            self.memory = HipMemory(self.hip, self._held, self.stream, artifact, self.gpu, kv, scratch, experts)
        except UserError:
            self.close()
            raise
        self.kv_types = self.memory.kv_types
        self.memory.upload()
        self._launches: dict[str, list[HipLaunch]] = {}
        self._boxes: Mapping[str, int] = {}
        self.pacer = Pacer(self.manifest, self.code_arch)
        self._graphs: dict[str, object] = {}
        self._marks: dict[str, list] = {}  # {function: events around its launches}, for `time`
        functions = self.manifest["functions"]
        heads = {name: launches_before_late(function, self._kernels) or 0 for name, function in functions.items()}
        self._carried = HipCarried(self.hip, self._held, self.stream, self.memory, functions)
        runs = self.memory, functions, self._launches, self._graphs, heads, self._carried
        self._runs = HipRuns(self.hip, self._held, self.stream, *runs)
        self._queue = RunQueue(self._runs, self.pacer, heads)
        self._captured = self._held.enter_context(ExitStack())
        self._held.callback(self.hip.names.hipStreamSynchronize, self.stream)  # registered last: `close` does it first
        if not self.manifest.get("inline"):  # otherwise `exchange_through` does it, as launches need its addresses
            for _ in self._prepare():
                pass

    def _prepare(self) -> Iterator[None]:
        """Prepares the launches and graphs of all functions. The iterator pauses after each step that it starts."""
        self._launches.update({name: self._bind(function) for name, function in self.manifest["functions"].items()})
        if os.environ.get(GRAPH_VARIABLE) != "0":
            yield from self._make_graphs()
        self.clear()

    def _override(self) -> str:
        """A note for the device's name if the user has overridden the arch, otherwise ""."""
        if OVERRIDE not in os.environ:
            return ""
        chip = next((f"; the chip is {gpu['arch']}" for gpu in kfd_gpus() if gpu["pci"] == self.gpu.pci), "")
        return f" by {OVERRIDE}={os.environ[OVERRIDE]}{chip}"

    def _load_kernels(self) -> None:
        file = self.artifact.path / self.manifest["libraries"][self.code_arch]
        self._kernels = self.manifest["launches"][self.code_arch]
        steps = [step for kernel in self._kernels.values() for step in kernel["steps"]]
        try:
            chips = self.code_arch, self.gpu.arch
            self._code, self._functions = code_objects.load(self.hip, self._held, file.read_bytes(), steps, chips)
        except HipError as e:
            if e.code not in CANNOT_LOAD:
                raise UserError(f"{file} lacks a kernel of this model ({e.code}); compile the model again") from e
            version = ".".join(map(str, self.version))
            raise UserError(
                f"HIP {version} cannot load the kernels for {self.gpu.arch} ({e.code}); install a newer ROCm, or "
                "compile the model again"
            ) from e

    def _bind(self, function: dict) -> list[HipLaunch]:
        """All kernel launches of a function, in order."""
        found = []
        for call in function["launches"]:
            kernel = call["kernel"]
            addresses = [self._address(arg) for arg in call["args"]] + self.memory.scratch(kernel)
            steps = self._kernels[kernel]["steps"]
            found += [launching.prepare(kernel, self._functions[step["symbol"]], step, addresses) for step in steps]
        return found

    def _address(self, arg: list) -> int:
        return self._boxes[arg[1]] if arg[0] == "box" else self.memory.address(arg)

    # ---- graphs

    @property
    def graphs(self) -> bool:
        """Whether functions run as graphs."""
        return bool(self._graphs)

    def _make_graphs(self) -> Iterator[None]:
        """Captures all functions, and compares replays with launches. If they differ or fail, no graphs are used."""
        expected = yield from self._trials({})
        try:
            graphs = {
                name: launching.capture(self.hip, self.stream, launches, self._captured)
                for name, launches in self._launches.items()
            }
            found = yield from self._trials(graphs)
        except HipError as e:
            log.warning(_NO_GRAPHS, e)
            return
        if wrong := [name for name in graphs if found[name] != expected[name]]:
            log.warning(_NO_GRAPHS, f"replays of {', '.join(wrong)} differ from launches")
            return
        self._graphs.update(graphs)

    def _trials(self, graphs: dict) -> Generator[None, None, dict[str, list[bytes]]]:
        """{function: results of `_trial`}. Clears the arena first, as unused rows are also sent and compared."""
        self.memory.clear("arena")
        found = {}
        for name in self._launches:
            found[name] = yield from self._trial(name, graphs)
        return found

    def _trial(self, function: str, graphs: dict) -> Generator[None, None, list[bytes]]:
        """Computes a few steps with different tokens and positions, by a graph if `graphs` has the function. Returns
        the bytes of each step's results: logits, and the data for other GPUs. The rows of all steps are consecutive in
        one sequence: single rows, then a chunk, as far as the function has these."""
        entry, vocab = self.manifest["functions"][function], self.manifest["model"]["vocab"]
        if is_encoder(function):
            self.write("state", (0, entry["rows"], 0, 0))
            self.write("answers", (entry["logits"], entry["logits"], 0, 0))
            for _ in self._run(function, graphs):
                pass
            return [self._fetch(ENCODED, entry["logits"]).tobytes() + self._carried.sent(function)]
        results, position = [], 0
        answering = any(arg[1] == "logits" for launch in entry["launches"] for arg in launch["args"])
        self.clear()
        write_private_pages(self, self.manifest)
        for step in range(CHECK_STEPS):
            live = min(1 + step, entry["rows"], self.manifest["context"] - position)
            single = live if entry["single"] == entry["rows"] else min(entry["single"], live - 1)
            tokens = (np.arange(live) + 7 * step + 1) % vocab
            singles = [(int(tokens[i]), position + i, 0) for i in range(single)]
            chunk = ChunkRows(tokens[single:], position + single, 0) if live > single else None
            answers = write_step(self, entry, singles, chunk)
            yield from self._run(function, graphs)
            logits = self._fetch("logits", answers).tobytes() if answering else b""
            results.append(logits + self._carried.sent(function))
            position += live
        return results

    # ---- the protocol

    def write(self, name: str, values) -> None:
        self.memory.write(name, values)
        self.pacer.write(name, values)

    def fill(self, name: str, rows: int, put: Callable[[np.ndarray], None]) -> None:
        self.memory.fill(name, rows, put)

    @contextmanager
    def _usable(self, doing: str) -> Iterator[None]:
        """See `QueuedDevice`. Raises MachineError for HIP's errors: the GPU is then unusable for this process."""
        try:
            self.hip("hipSetDevice", self.gpu.index)  # for the calling thread
            yield
        except HipError as e:
            raise MachineError(
                f"GPU {self.gpu.index}, {self.gpu.name}, failed while {doing} ({e}): a kernel ran too long, the driver "
                "failed, or another program crashed it; load the model again, and if that happens again, update ROCm "
                "and see the kernel log (dmesg)"
            ) from e

    def _run_alone(self, function: str, plain: bool) -> Iterator[None]:
        return self._run(function, {} if plain else self._graphs)

    def _run(self, function: str, graphs: dict) -> Iterator[None]:
        """Runs a function, by its graph if `graphs` has one and the step is not long. Pauses before each wait."""
        self._send_inputs(function)
        part = self._carried.parts[1]
        for piece in self.pacer.pieces(function) or ((),):
            start = time.perf_counter()
            if function in graphs and not piece:
                self.hip("hipGraphLaunch", graphs[function], self.stream)
            else:
                launches = self._launches[function]
                launching.enqueue(self.hip, self.stream, [launches[i] for i in self._numbers(function, piece)])
            yield
            self.hip("hipSetDevice", self.gpu.index)  # the caller may have started other GPUs during the pause
            self._wait()
            self.pacer.record(function, time.perf_counter() - start, piece)
        self._fetch_sent(function, part)

    def _send_inputs(self, function: str) -> None:
        self.memory.send_inputs()
        self._carried.enqueue_received(function)

    def _fetch_sent(self, function: str, part: int | None = None) -> None:
        if self.manifest["functions"][function].get("sends"):
            self._wait(self._carried.enqueue_sent(function, part))

    def exchange_through(self, boxes: Mapping[str, int]) -> Iterator[None]:
        self._boxes, steps = boxes, self._prepare()
        while True:
            with self._usable("loading the model"):
                if next(steps, self) is self:
                    return
            yield

    def connect(self, before: Handover | None, after: Handover | None) -> None:
        with self._usable("loading the model"):
            self._carried.connect(before, after)

    def hand_over(self, received: int, sent: int) -> None:
        self._carried.parts = received, sent

    def _numbers(self, function: str, piece: WorkPiece) -> Sequence[int]:
        """The indices of a piece's launches; all for the piece (). HIP launches whole grids, so parts are ignored."""
        return [part.launch for part in piece] or range(len(self._launches[function]))

    def time(self, function: str, meanwhile: Callable[[], None] | None = None) -> list[tuple[str, float, float]]:
        """See the protocol. Runs a function with an event before and after each launch. Gaps are longer than in a
        graph. meanwhile: called once the GPU computes."""
        with self._usable(f"running {function}"):
            return self._time(function, meanwhile)

    def _time(self, function: str, meanwhile: Callable[[], None] | None) -> list[tuple[str, float, float]]:
        self._queue.settle()
        launches = self._launches[function]
        if function not in self._marks:
            self._marks[function] = launching.events(self.hip, self._held, 2 * len(launches))
        marks = self._marks[function]
        self._send_inputs(function)
        for piece in self.pacer.pieces(function) or ((),):
            numbers = self._numbers(function, piece)
            first, end = numbers[0], numbers[-1] + 1
            launching.enqueue_timed(self.hip, self.stream, launches[first:end], marks[2 * first : 2 * end])
            if meanwhile and first == 0:
                meanwhile()
                self.hip("hipSetDevice", self.gpu.index)
            self._wait()
        self._fetch_sent(function)
        return launching.spans(self.hip, launches, marks)

    def copy_bandwidth(self) -> float:
        """See the protocol. 0.0 without enough memory."""
        with self._usable("copying"):
            return launching.copy_bandwidth(self.hip, self.stream)

    def _wait(self, stream=None) -> None:
        start = time.perf_counter()
        self.hip("hipStreamSynchronize", stream or self.stream)
        self._runs.waited += time.perf_counter() - start

    def read(self, name: str, rows: int, first: int = 0) -> np.ndarray:
        found = self._runs.read(name, rows)
        if found is not None:
            return found[first:]
        with self._usable(f"reading {name}"):
            return self._fetch(name, rows, first)

    def _fetch(self, name: str, rows: int, first: int = 0) -> np.ndarray:
        array = self.memory.fetch(name, rows, first)
        self._wait()
        return array

    def page_parts(self, span: int) -> list[tuple[str, int]]:
        return page_parts(self.manifest, span)

    def _page_places(self, span: int, pages: Sequence[int]) -> list[tuple[str, int, int]]:
        """The parts of the KV cache's tensors that these pages consist of, page by page: (name, offset, bytes)."""
        parts = self.page_parts(span)
        return [(name, page * count, count) for page in pages for name, count in parts]

    def read_pages(self, span: int, pages: Sequence[int]) -> np.ndarray:
        with self._usable("reading the cache"):
            return self.memory.read_parts(self._page_places(span, pages)).reshape(len(pages), -1).copy()

    def write_pages(self, span: int, pages: Sequence[int], contents: np.ndarray) -> None:
        with self._usable("writing the cache"):
            self.memory.write_parts(self._page_places(span, pages), contents)

    def page_memory(self, span: int, count: int) -> np.ndarray:
        with self._usable("allocating memory"):
            nbytes = sum(nbytes for _, nbytes in self.page_parts(span))
            return self.memory.shared(count * nbytes).reshape(count, nbytes)

    def clear(self) -> None:
        with self._usable("clearing the cache"):
            self.memory.clear("kv")
            self.hip("hipStreamSynchronize", self.stream)
