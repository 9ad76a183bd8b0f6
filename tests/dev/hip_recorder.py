"""A stand-in for AMD's `rocm.bindings.hip`, for machines without a GPU: it computes, records, and watches over order
and lifetimes.

Device memory is host memory with real addresses. Kernels are Python functions, `kernels[symbol] = (number of arguments,
function)`; the function gets the launch (symbol, grid, block) and, for each pointer, the bytes from there to the end of
its allocation as a writable numpy array. As on a GPU, nothing happens when it is enqueued: copies, fills, launches and
replays run when the stream or an event is waited for, so a host buffer that is changed or freed too early shows. Events
take the time of `clock`, which that work moves on. `calls` lists every call's name; a wrong use is an AssertionError.

A kernel that waits for one on another GPU returns WAITING, and is called again once other streams have gone on; if none
can, its launch is `late`. A GPU has its own memory, which others reach where that was enabled, and only the part of it
that is fine-grained.
"""

import ctypes
import threading
from collections.abc import Callable
from types import SimpleNamespace

from tests.dev.hip_memory import Memory
from tests.dev.hip_types import OK, WAITING, Handle, Launch, hipError_t, hipMemcpyKind, hipStreamCaptureMode

ELF, GIB = b"\x7fELF", 1 << 30
# What `clock` says that work takes, so that what a device reports can be computed.
LAUNCH_MS, EVENT_MS, BYTES_PER_MS = 0.010, 0.001, 1e9


class Recorder(Memory):
    """gpus: dicts of properties that differ from the default's. memory: bytes that allocations may use on each, unless
    its own "memory" says something else. fail: {call: error's name}, on `fail_on` or all GPUs.

    before_replay(count, arrays of the first launch's arguments) is called before the count-th replay of a graph, to
    imitate a broken driver; if it returns False, the replay does nothing.
    """

    hipError_t, hipMemcpyKind, hipStreamCaptureMode = hipError_t, hipMemcpyKind, hipStreamCaptureMode
    hipStreamNonBlocking, hipEventDisableTiming, hipHostMallocMapped, hipHostMallocNonCoherent = 1, 2, 2, -(1 << 31)

    def __init__(
        self, kernels: dict[str, tuple[int, Callable]], gpus=({},), memory: int = GIB, fail=None, before_replay=None
    ):
        default = {"name": b"Radeon", "gcnArchName": b"gfx1100", "totalGlobalMem": memory, "integrated": 0}
        default |= {"pciDomainID": 0, "pciBusID": 3, "pciDeviceID": 0}
        super().__init__([default | gpu for gpu in gpus], memory)
        self.kernels = kernels
        self.fail, self.before_replay = fail or {}, before_replay
        self.fail_on: int | None = None
        self.calls: list[str] = []
        self.launched: list[tuple] = []  # (symbol, grid, block) of every kernel that ran
        self.handles: list[Handle] = []
        self.captures: dict[Handle, list[Callable]] = {}  # by stream
        self.clock = 0.0  # milliseconds: of work that is done
        self.late = False  # whether what kernels wait for does not come
        self._lock = threading.RLock()  # one call at a time

    def __getattribute__(self, name):
        value = super().__getattribute__(name)
        if not name.startswith("hip") or not callable(value) or isinstance(value, type):
            return value

        def call(*args):
            with self._lock:
                self.calls.append(name)
                error = self.fail.get(name) if self.fail_on in (None, self.current) else None
                if error and name == "hipStreamEndCapture":
                    self.captures.clear()  # HIP leaves capture mode, too
                return (hipError_t[error], None) if error else value(*args)

        return call

    # ---- the machine

    def hipRuntimeGetVersion(self):
        return *OK, 60443483

    def hipGetDeviceCount(self):
        return (*OK, len(self.gpus)) if self.gpus else (hipError_t.hipErrorNoDevice, 0)

    def hipGetDeviceProperties(self, index):
        return *OK, SimpleNamespace(**self.gpus[index])

    def hipSetDevice(self, index):
        assert 0 <= index < len(self.gpus)
        self._thread.gpu = index
        return OK

    def hipDeviceCanAccessPeer(self, index, other):
        assert index != other
        return *OK, int(self.gpus[index].get("peers", True))

    def hipDeviceEnablePeerAccess(self, other, flags):
        assert other != self.current and flags == 0
        if (self.current, other) in self.reached:
            return (hipError_t.hipErrorPeerAccessAlreadyEnabled,)
        self.reached.add((self.current, other))
        return OK

    def hipDeviceSynchronize(self):
        for stream in {one for one, _ in self.queue if one.gpu == self.current}:
            self._flush(stream)
        return OK

    # ---- streams, events

    def _handle(self, kind, **facts):
        handle = Handle(kind, gpu=self.current, **facts)
        self.handles.append(handle)
        return handle

    def _destroy(self, handle, kind):
        assert handle.kind == kind and handle.alive
        handle.alive = False
        return OK

    def _enqueue(self, stream, work):
        assert stream.kind == "stream" and stream.alive and stream.gpu == self.current
        if stream in self.captures:
            self.captures[stream].append(work)
        else:
            self.queue.append((stream, work))
        return OK

    def _flush(self, stream=None):
        """Does what is enqueued on a stream, or on all."""
        while any(stream in (None, one) for one, _ in self.queue):
            self._advance(stream or self.queue[0][0])
        return OK

    def _advance(self, stream) -> None:
        """Does the oldest work of a stream or, where that waits, of another one."""
        heads = {one: i for i, (one, _) in reversed([*enumerate(self.queue)])}
        for late in (False, True):
            for one in sorted(heads, key=lambda one: (one is not stream, heads[one])):
                entry = self.queue[heads[one]]
                self.late = late
                if entry[1]() is not WAITING:
                    self.queue.remove(entry)
                    return
        raise AssertionError("kernels wait for one another")

    def hipStreamCreateWithFlags(self, flags):
        return *OK, self._handle("stream")

    def hipStreamDestroy(self, stream):
        return self._destroy(stream, "stream")

    def hipStreamSynchronize(self, stream):
        assert stream.alive and stream not in self.captures
        return self._flush(stream)

    def hipStreamQuery(self, stream):
        """What was enqueued is done little by little."""
        assert stream.alive
        return self._not_ready(stream) if any(one is stream for one, _ in self.queue) else OK

    def hipEventCreateWithFlags(self, flags):
        timed = flags != self.hipEventDisableTiming
        return *OK, self._handle("event", asked=0, come=0, stream=None, timed=timed, at=None)

    def hipEventRecord(self, event, stream):
        assert event.gpu == stream.gpu
        event.asked, event.stream = event.asked + 1, stream

        def work():
            self.clock += EVENT_MS
            event.come, event.at = event.come + 1, self.clock

        return self._enqueue(stream, work)

    def hipStreamWaitEvent(self, stream, event, flags):
        asked = event.asked
        return self._enqueue(stream, lambda: WAITING if event.come < asked else None)

    def hipEventQuery(self, event):
        return OK if event.come == event.asked else self._not_ready(event.stream)

    def _not_ready(self, stream):
        self._advance(stream)
        return (hipError_t.hipErrorNotReady,)

    def hipEventElapsedTime(self, begin, end):
        assert begin.timed and end.timed and begin.at is not None and end.at is not None
        return *OK, end.at - begin.at

    def hipEventSynchronize(self, event):
        assert event.alive
        while event.come < event.asked:
            self._advance(event.stream)
        return OK

    def hipEventDestroy(self, event):
        return self._destroy(event, "event")

    def hipMemcpyAsync(self, target, source, nbytes, kind, stream):
        sides = {1: ("host", "device"), 2: ("device", "host"), 3: ("device", "device")}[kind]
        if not any(where == "device" for _, where in self.blocks.values()):  # an APU that works in the host's memory
            sides = ("host", "host")
        read, written = (
            self.bytes_at(at, nbytes, side, stream.gpu) for at, side in zip((source, target), sides, strict=True)
        )

        def work():
            self.clock += nbytes / BYTES_PER_MS
            written[:] = read

        return self._enqueue(stream, work)

    def hipMemcpy(self, target, source, nbytes, kind):
        device, other = (target, source) if kind == hipMemcpyKind.hipMemcpyHostToDevice else (source, target)
        idle = not any(stream.gpu == self.current for stream, _ in self.queue)
        assert idle or kind == hipMemcpyKind.hipMemcpyDeviceToHost
        assert len(self.bytes_at(device, nbytes, "device", self.current)) == nbytes and other
        ctypes.memmove(target, source, nbytes)
        return OK

    def hipMemset(self, target, value, nbytes):
        assert not any(stream.gpu == self.current for stream, _ in self.queue)
        self.bytes_at(target, nbytes, "device", self.current).fill(value)
        return OK

    def hipMemsetAsync(self, target, value, nbytes, stream):
        array = self.bytes_at(target, nbytes, gpu=stream.gpu)
        return self._enqueue(stream, lambda: array.fill(value))

    # ---- kernels

    def hipModuleLoadData(self, image):
        arch = self.gpus[self.current]["gcnArchName"].split(b":")[0]
        if not image.startswith(ELF) or b"-" + arch not in image:
            return hipError_t.hipErrorNoBinaryForGpu, None
        return *OK, self._handle("module", image=image)

    def hipModuleUnload(self, module):
        return self._destroy(module, "module")

    def hipModuleGetFunction(self, module, symbol):
        name = symbol.decode()
        return (
            (*OK, self._handle("function", module=module, symbol=name))
            if name in self.kernels
            else (hipError_t.hipErrorNotFound, None)
        )

    def hipModuleLaunchKernel(self, function, gx, gy, gz, bx, by, bz, shared, stream, params, extra):
        assert function.module.alive and shared == 0 and extra is None
        assert function.module.gpu == stream.gpu == self.current
        assert min(gx, gy, gz, bx, by, bz) >= 1 and bx * by * bz <= 256
        count, compute = self.kernels[function.symbol]
        # HIP copies the arguments when a launch is enqueued or captured.
        pointers = [ctypes.c_uint64.from_address(p).value for p in (ctypes.c_uint64 * count).from_address(params)]
        assert all(p % 64 == 0 for p in pointers)

        def work():
            assert function.module.alive
            launch = Launch((function.symbol, (gx, gy, gz), (bx, by, bz)))
            launch.late = self.late
            if compute(launch, *(self.bytes_at(p, gpu=stream.gpu) for p in pointers)) is WAITING:
                return WAITING
            self.launched.append(launch)
            self.clock += LAUNCH_MS
            return None

        work.pointers = pointers
        return self._enqueue(stream, work)

    def hipStreamBeginCapture(self, stream, mode):
        assert stream not in self.captures and not any(one is stream for one, _ in self.queue)
        assert mode == hipStreamCaptureMode.hipStreamCaptureModeThreadLocal
        self.captures[stream] = []
        return OK

    def hipStreamEndCapture(self, stream):
        return *OK, self._handle("graph", work=self.captures.pop(stream))

    def hipGraphInstantiate(self, graph, size):
        assert graph.alive
        return *OK, self._handle("exec", work=list(graph.work), replays=0), None, None

    def hipGraphLaunch(self, executable, stream):
        assert executable.alive and stream not in self.captures
        left: list[Callable] = []  # when it has begun, the last first

        def work():
            if not left:
                executable.replays += 1
                arguments = [self.bytes_at(p) for p in executable.work[0].pointers]
                if self.before_replay is None or self.before_replay(executable.replays, arguments) is not False:
                    left.extend(reversed(executable.work))
            while left:
                if left[-1]() is WAITING:
                    return WAITING
                left.pop()
            return None

        return self._enqueue(stream, work)

    def hipGraphDestroy(self, graph):
        return self._destroy(graph, "graph")

    def hipGraphExecDestroy(self, executable):
        return self._destroy(executable, "exec")

    def leaks(self) -> list[str]:
        """What was not given back. Functions belong to their module."""
        return [h.kind for h in self.handles if h.alive and h.kind != "function"] + [
            where for _, where in self.blocks.values()
        ]
