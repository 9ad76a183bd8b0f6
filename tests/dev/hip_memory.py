"""The memory of `hip_recorder.py`'s GPUs, and of their host: allocations, and who reaches them."""

import ctypes
import threading
from collections.abc import Callable

import numpy as np

from tests.dev.hip_types import OK, Handle, hipError_t


class Memory:
    """gpus: properties of each. memory: bytes that allocations may use on each, unless its own "memory" says something
    else."""

    hipHostRegisterPortable = hipDeviceMallocFinegrained = 1

    def __init__(self, gpus: list[dict], memory: int) -> None:
        self.gpus, self.memory = gpus, memory
        self.blocks: dict[int, tuple[np.ndarray, str]] = {}  # address: (bytes, "device" or "host")
        self.owners: dict[int, int] = {}  # address of device memory: GPU
        self.reached: set[tuple[int, int]] = set()  # (GPU, another one whose memory it may access)
        self.fine: list[tuple[int, int]] = []  # (GPU, address) of memory that others see while kernels run
        self.queue: list[tuple[Handle, Callable]] = []  # enqueued work of all streams
        self._thread = threading.local()

    @property
    def current(self) -> int:
        """The GPU of this thread."""
        return getattr(self._thread, "gpu", 0)

    def _free_bytes(self) -> int:
        used = sum(len(self.blocks[at][0]) for at, owner in self.owners.items() if owner == self.current)
        return self.gpus[self.current].get("memory", self.memory) - used

    def hipMemGetInfo(self):
        return *OK, self._free_bytes(), self.gpus[self.current].get("memory", self.memory)

    def used(self, kind: str) -> int:
        return sum(len(array) for array, where in self.blocks.values() if where == kind)

    def _new(self, nbytes, kind):
        assert nbytes > 0
        array = np.full(nbytes + 256, 0xA5, np.uint8)  # what nobody wrote is not zero
        array = array[-array.ctypes.data % 256 :][:nbytes]
        self.blocks[array.ctypes.data] = array, kind
        return *OK, array.ctypes.data

    def hipMalloc(self, nbytes):
        if nbytes > self._free_bytes():
            return hipError_t.hipErrorOutOfMemory, None
        code, address = self._new(nbytes, "device")
        self.owners[address] = self.current
        return code, address

    def hipExtMallocWithFlags(self, nbytes, flags):
        assert flags == self.hipDeviceMallocFinegrained
        code, address = self.hipMalloc(nbytes)
        self.fine.append((self.current, address))
        return code, address

    def hipHostMalloc(self, nbytes, flags):
        assert flags in (0, 0x80000002)
        return self._new(nbytes, "host")

    def hipHostRegister(self, address, nbytes, flags):
        assert flags == self.hipHostRegisterPortable
        if address in self.blocks:
            return (hipError_t.hipErrorHostMemoryAlreadyRegistered,)
        memory = (ctypes.c_uint8 * nbytes).from_address(address)
        self.blocks[address] = np.ctypeslib.as_array(memory), "host"
        return OK

    def hipHostUnregister(self, address):
        assert self.blocks.pop(address)[1] == "host"
        return OK

    def hipHostGetDevicePointer(self, address, flags):
        assert self.blocks[address][1] == "host" and flags == 0
        return *OK, address

    def _free(self, address, kind):
        array, where = self.blocks.pop(address)
        owner = self.owners.pop(address, self.current)
        users = {owner} | {gpu for gpu, of in self.reached if of == owner and (owner, address) in self.fine}
        assert not any(stream.gpu in users for stream, _ in self.queue), "memory freed while work is enqueued"
        assert where == kind
        array[:] = 0x5A  # makes later reads visible
        return OK

    def hipFree(self, address):
        return self._free(address, "device")

    def hipHostFree(self, address):
        return self._free(address, "host")

    def bytes_at(
        self, address: int, nbytes: int | None = None, kind: str | None = None, gpu: int | None = None
    ) -> np.ndarray:
        """Memory from an address on, which must lie in a live allocation (of that kind, that the GPU reaches)."""
        for start, (array, where) in self.blocks.items():
            if start <= address < start + len(array) and kind in (None, where):
                owner = self.owners.get(start, gpu)
                reachable = (gpu, owner) in self.reached and (owner, start) in self.fine
                assert gpu in (None, owner) or reachable, f"GPU {gpu} reads or writes memory of GPU {owner}"
                rest = array[address - start :]
                assert nbytes is None or nbytes <= len(rest), "beyond the end of an allocation"
                return rest if nbytes is None else rest[:nbytes]
        raise AssertionError(f"address {address:#x} is in no live {kind or ''} allocation")
