"""Measures on the CPU. Kernels are in shared libraries, and run on the library's thread pool, as in CpuDevice."""

import mmap
import time
from contextlib import suppress
from pathlib import Path

import numpy as np

from mlc_amd.runtime.devices.cpu import ALIGNMENT, KernelCall, Kernels, Replay, start_threads
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.host import available_memory, cpu_flags, last_level_cache, selected_threads

SHARE = 4  # copies may take 1 / SHARE of the machine's memory
UNKNOWN_MEMORY = 4 << 30  # bytes that are assumed if the system does not report its memory


class CpuBackend:
    """The backend for CPUs; see `timing.py`. device: the number of threads, or None."""

    target = 0.01
    noise = 0.0

    def __init__(self, device: str | None, candidate):
        if missing := set(candidate.facts["needs"]["flags"]) - cpu_flags():
            raise UserError(
                f"these kernels are for '{candidate.facts['arch']}', and this CPU lacks {', '.join(sorted(missing))}"
            )
        self.threads = selected_threads(device)
        self.name = f"{_model()}, {self.threads} threads"
        self.facts = {"device": self.name, "driver": "threads"}
        self._forget()
        self.cache = min(2 * last_level_cache(), (available_memory() or UNKNOWN_MEMORY) // SHARE // 4)

    def open(self, sizes: dict) -> None:
        self._forget()
        self._at, end = {}, 0
        for key, nbytes in sizes.items():
            self._at[key], end = end, end + -(-nbytes // ALIGNMENT) * ALIGNMENT
        memory = mmap.mmap(-1, max(end, 1))
        # small pages, like those of weights that are mapped from a file
        with suppress(OSError, AttributeError):
            memory.madvise(mmap.MADV_NOHUGEPAGE)
        self._memory = np.frombuffer(memory, np.uint8)

    def _forget(self) -> None:
        """Releases the last calls, and thereby their memory."""
        self._replay_of, self._calls, self._replay = None, None, None

    def put(self, key, array: np.ndarray) -> None:
        self._memory[self._at[key] : self._at[key] + array.nbytes] = array

    def get(self, key, nbytes: int) -> bytes:
        return self._memory[self._at[key] : self._at[key] + nbytes].tobytes()

    def load(self, candidates) -> list:
        return [self._load(candidate) for candidate in candidates]

    def _load(self, candidate):
        try:
            kernels = Kernels(candidate.code)
            start_threads(self.threads)
            return kernels
        except (RuntimeError, OSError, AttributeError) as e:
            return e

    def bind(self, handle, candidate, keys) -> list[KernelCall]:
        arrays = [
            self._memory[self._at[key] :][: p.nbytes].view(p.numpy).reshape(p.shape)
            for p, key in zip(candidate.params, keys, strict=True)
        ]
        return [handle.call(step["symbol"], [arrays[i] for i in step["args"]]) for step in candidate.steps]

    def run(self, calls) -> float:
        # made before the clock starts, and only once for repeated calls: otherwise the threads would fall asleep
        replay = self._replay
        if replay is None or [id(call) for call in calls] != self._replay_of:
            # keeps the calls alive, so that their ids stay unique
            self._replay_of, self._calls = [id(call) for call in calls], calls
            replay = self._replay = Replay([step for call in calls for step in call])
        waited = _waited()
        start = time.perf_counter()
        replay()
        seconds = time.perf_counter() - start
        self.noise = (_waited() - waited) / seconds
        return seconds

    def close(self) -> None:
        self._forget()
        self._memory = np.empty(0, np.uint8)


def _waited() -> float:
    """Total seconds in which this process's threads waited for a processor; 0 if Linux does not report it."""
    total = 0
    with suppress(OSError, IndexError):  # a thread may end meanwhile
        for file in Path("/proc/self/task").glob("*/schedstat"):
            total += int(file.read_text().split()[1])
    return total * 1e-9


def _model() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return "cpu"
