"""The io buffers of a Vulkan device: where kernels find them, and how they get there from the host and back.

In: a manifest's `io`. Out: `Io`. Kernels read what describes a step in the memory that the host writes, unless that is
across the bus: then each run of a function copies it first, but what is kept for many steps only when it changed. Each
run copies small results to memory that the host reads fast; of large ones, `read` copies the rows that it is asked for.
"""

import ctypes
from collections.abc import Mapping

import numpy as np

from mlc_amd.runtime.devices.vulkan import api
from mlc_amd.runtime.devices.vulkan.commands import Recorder
from mlc_amd.runtime.devices.vulkan.context import Context
from mlc_amd.runtime.devices.vulkan.memory import Block, Memory
from mlc_amd.runtime.steps import LATE, OUTPUTS, is_kept

RECORDED = 2 << 20  # bytes of an output, at most, that every run of a function copies to the host


def byte_count(dtype: str, shape) -> int:
    return int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize


class Io:
    """places: name -> (block, offset) of each buffer, for kernels. blocks: those that must be zeroed before use.
    copies: whether what the host writes is copied for kernels."""

    def __init__(self, context: Context, memory: Memory, entries: Mapping[str, Mapping]):
        self.context, self.memory, self.entries = context, memory, entries
        sizes = {name: byte_count(entry["dtype"], entry["shape"]) for name, entry in entries.items()}
        tables = {name: size for name, size in sizes.items() if is_kept(name)}
        outputs = {name: size for name, size in sizes.items() if name in OUTPUTS}
        inputs = {name: size for name, size in sizes.items() if name not in tables and name not in outputs}
        results, (self._results,) = memory.spread(outputs, "device")
        read, (self._outputs,) = memory.spread(outputs, "output")
        written, (self._inputs,) = memory.spread(inputs, "input")
        paged, (self._tables,) = memory.spread(tables, "input")
        self.copies = not context.gpu.unified and not self._inputs.flags & api.DEVICE_LOCAL
        self._input_copy, table_copy = None, None
        self._renew: dict[str, ctypes.Structure] = {}  # what copies a table
        self._stale: set[str] = set()  # tables that the GPU has an old copy of
        if self.copies:
            self._input_copy, table_copy = (
                memory.block(block.nbytes, "device") for block in (self._inputs, self._tables)
            )
            for name, (block, offset) in paged.items():
                self._renew[name] = self._copy(block, offset, table_copy, offset, tables[name])
        self.places = {
            **results,
            **{name: (self._input_copy or block, offset) for name, (block, offset) in written.items()},
            **{name: (table_copy or block, offset) for name, (block, offset) in paged.items()},
        }
        self._host = {
            name: block.view(offset, entries[name]["dtype"], entries[name]["shape"])
            for name, (block, offset) in (written | paged | read).items()
        }
        self._late_at = {name: place for name, place in (written | paged).items() if name in LATE}
        self._output_at = {name: offset for name, (_, offset) in read.items()}
        self._rows: dict[str, int] = {}  # of outputs that the host has
        self._copied: dict[int, dict[str, int]] = {}  # of `_recorded`, by rows of logits
        for name in (*inputs, *tables):
            self._host[name][...] = 0
        self.blocks = [block for block in (self._results, self._input_copy, table_copy) if block]

    def byte_count(self, name: str, function: Mapping) -> int:
        """Bytes of the rows of a buffer that a function uses."""
        used: dict[str, int] = {"tokens": function["rows"], "rows": function["rows"]}
        used |= dict.fromkeys(OUTPUTS, function["logits"])
        return self._row_bytes(name, used[name] if name in used else self.entries[name]["shape"][0])

    def _row_bytes(self, name: str, rows: int) -> int:
        entry = self.entries[name]
        return byte_count(entry["dtype"], [rows, *entry["shape"][1:]])

    def _copy(self, source: Block, source_at: int, target: Block, target_at: int, count: int) -> ctypes.Structure:
        recorder = Recorder(self.context, 0)
        recorder.begin()
        recorder.copy(source, source_at, target, target_at, count)
        recorder.end()
        return self.context.submission(recorder.commands)

    # ---- parts of a function's command buffer

    def record_inputs(self, recorder: Recorder) -> None:
        if self._input_copy:
            recorder.copy(self._inputs, 0, self._input_copy, 0, self._inputs.nbytes)

    def record_late(self, recorder: Recorder, function: Mapping) -> None:
        """Of LATE inputs, the rows that a function uses, where `record_inputs` or `before` came too early."""
        for name, (block, offset) in self._late_at.items() if self.copies else ():
            rows = self._row_bytes(name, function["logits"])
            recorder.copy(block, offset, *self.places[name], rows)

    def record_outputs(self, recorder: Recorder, function: Mapping) -> None:
        for name in self._recorded(function):
            block, offset = self.places[name]
            recorder.copy(block, offset, self._outputs, self._output_at[name], self.byte_count(name, function))

    def _recorded(self, function: Mapping) -> Mapping[str, int]:
        """Outputs that a run of a function copies, with their rows."""
        rows = function["logits"]
        if rows not in self._copied:
            found = {name: self.byte_count(name, function) for name in self._output_at}
            self._copied[rows] = {
                name: size // self._row_bytes(name, 1) for name, size in found.items() if size <= RECORDED
            }
        return self._copied[rows]

    # ---- the host's side

    def write(self, name: str, values) -> None:
        self._host[name][: len(values)] = values
        if name in self._renew:
            self._stale.add(name)

    def before(self, function: Mapping) -> None:
        """Before a run of the function is submitted."""
        while self._stale:
            self.context.submit(self._renew[self._stale.pop()])
        self._rows = dict(self._recorded(function))

    def late(self) -> None:
        """Behind what `record_late` recorded."""
        self._stale.difference_update(LATE)

    def read(self, name: str, rows: int) -> np.ndarray:
        """The first rows of a buffer, once the run is done; valid until the next one."""
        if name in self._output_at and rows > self._rows.get(name, 0):
            block, offset = self.places[name]
            copy = self._copy(block, offset, self._outputs, self._output_at[name], self._row_bytes(name, rows))
            self.context.submit(copy)
            self.context.wait()
            self.context.release(copy)
            self._rows[name] = rows
        self.memory.invalidate(self._outputs)
        return self._host[name][:rows]
