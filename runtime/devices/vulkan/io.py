"""The io buffers of a Vulkan device: their memory, and the copies between host and GPU.

In: a manifest's `io`. Out: `Io`. There are three kinds of io buffers:

- inputs of each step: kernels read them in the memory that the host writes if this is device memory; otherwise each run
  first copies them to device memory.
- tables, which are kept for many steps (`is_kept`): likewise, but they are copied only after the host has written them.
- results: each run copies small ones, and features of images, to memory that the host reads fast. Of large ones, `read`
  copies the requested rows.
"""

import ctypes
from collections.abc import Callable, Mapping

import numpy as np

from mlc_amd.runtime.artifact.io_names import CHOSEN, ENCODED, LATE, PATCHES, RESULTS, is_kept, results_of
from mlc_amd.runtime.artifact.weight_block import byte_count
from mlc_amd.runtime.devices.run_queue import SLOTS
from mlc_amd.runtime.devices.vulkan import api
from mlc_amd.runtime.devices.vulkan.commands import CommandRecorder
from mlc_amd.runtime.devices.vulkan.context import Context
from mlc_amd.runtime.devices.vulkan.memory import MemoryBlock, VulkanMemory

# Bytes: outputs up to this size are copied to the host by every run, and ENCODED, as callers always read it.
RECORDED = 2 << 20


class _Inputs:
    """The memory that the host writes for the runs of a slot. block: for the inputs of each step; tables: for tables.
    The arguments `inputs` and `tables` are {name: bytes}; entries: the manifest's `io`."""

    def __init__(self, memory: VulkanMemory, inputs: dict[str, int], tables: dict[str, int], entries: Mapping):
        self.places, (self.block,) = memory.spread(inputs, "input")
        self.table_places, (self.tables,) = memory.spread(tables, "input")
        self.bytes = self.block.view(0, np.uint8, (self.block.nbytes,))
        self.views = {
            name: self.tables.view(offset, entries[name]["dtype"], entries[name]["shape"])
            for name, (_, offset) in self.table_places.items()
        }
        self.stale = True  # whether the host has written inputs since the last `put`
        # {table: number of first rows that the host has written since the last `put`}
        self.dirty = {name: entries[name]["shape"][0] for name in tables if name not in PATCHES}
        # {(table, rows): submission that copies the first rows to the memory that kernels read}
        self.renew: dict[tuple[str, int], ctypes.Structure] = {}

    def put(self, inputs: np.ndarray, tables: Mapping[str, np.ndarray]) -> None:
        """Copies what the host has written since the last call to this memory."""
        if self.stale:
            self.bytes[:] = inputs
            self.stale = False
        while self.dirty:
            name, rows = self.dirty.popitem()
            self.views[name][:rows] = tables[name][:rows]


class _Outputs:
    """The memory to which the runs of a slot copy results for the host. at: {name: offset in `block`}; views: {name:
    array}. sizes: {name: bytes}."""

    def __init__(self, memory: VulkanMemory, sizes: dict[str, int], entries: Mapping):
        places, (self.block,) = memory.spread(sizes, "output")
        self.at = {name: offset for name, (_, offset) in places.items()}
        of = {name: (entries[name]["dtype"], entries[name]["shape"]) for name in self.at}
        self.views = {name: self.block.view(offset, *of[name]) for name, offset in self.at.items()}


class Io:
    """The io buffers. places: {name: (block, offset)}, the memory that kernels use. blocks: the blocks that must be
    zeroed before use. copies: whether inputs are copied to the memory that kernels read.

    `write` writes to arrays of the host. When a run is submitted, they are put into memory that the GPU reads. Only
    PATCHES are written there directly: no run in progress reads them.

    A run that starts while another one is in progress has a *slot* (run_queue.py): memory for its inputs, from which it
    copies them, and for its chosen tokens, to which it copies these. Its other outputs stay on the GPU until they are
    read. `slot` is None for all other runs.
    """

    def __init__(self, context: Context, memory: VulkanMemory, entries: Mapping[str, Mapping]):
        self.context, self.memory, self.entries = context, memory, entries
        sizes = {name: byte_count(entry["dtype"], entry["shape"]) for name, entry in entries.items()}
        self._table_sizes = {name: size for name, size in sizes.items() if is_kept(name)}
        self._output_sizes = {name: size for name, size in sizes.items() if name in RESULTS}
        others = {*self._table_sizes, *RESULTS}
        self._input_sizes = {name: size for name, size in sizes.items() if name not in others}
        results, (self._results,) = memory.spread(self._output_sizes, "device")
        own = _Inputs(memory, self._input_sizes, self._table_sizes, entries)
        self._inputs: dict[int | None, _Inputs] = {None: own}  # by slot
        self.copies = not context.gpu.unified and not own.block.flags & api.DEVICE_LOCAL
        self._input_copy = table_copy = None
        if self.copies:
            self._input_copy, table_copy = (memory.block(block.nbytes, "device") for block in (own.block, own.tables))
        self.places = {
            **results,
            **{name: (self._input_copy or block, offset) for name, (block, offset) in own.places.items()},
            **{name: (table_copy or block, offset) for name, (block, offset) in own.table_places.items()},
        }
        self._written = np.zeros(own.block.nbytes, np.uint8)  # all inputs, as the host has written them
        self._host = {name: own.views[name] for name in self._table_sizes if name in PATCHES}
        for array in self._host.values():
            array[...] = 0
        kept = self._table_sizes.keys() - self._host.keys()
        self._host |= {name: np.zeros(entries[name]["shape"], entries[name]["dtype"]) for name in kept}
        for name, (_, offset) in own.places.items():
            written = self._written[offset : offset + sizes[name]]
            self._host[name] = written.view(entries[name]["dtype"]).reshape(entries[name]["shape"])
        self._outputs: dict[int | None, _Outputs] = {None: _Outputs(memory, self._output_sizes, entries)}  # by slot
        self._stale: dict[str, int] = {}  # {table: number of first rows that are old in the memory that kernels read}
        self._rows: dict[str, int] = {}  # {output: number of first rows that the host has}
        self._read_from = self._outputs[None]
        self._copied: dict[tuple[int, bool], dict[str, int]] = {}  # results of `_recorded`
        own.put(self._written, self._host)
        self.blocks = [block for block in (self._results, self._input_copy, table_copy) if block]

    def _renewal(self, inputs: _Inputs, name: str, rows: int) -> ctypes.Structure:
        """The submission that copies the first rows of a table to the memory that kernels read. The number of rows is
        rounded up to a power of two, so that few different submissions are recorded."""
        rows = min(1 << (rows - 1).bit_length(), self.entries[name]["shape"][0])
        if (name, rows) not in inputs.renew:
            copy = self._copy(*inputs.table_places[name], *self.places[name], self._row_bytes(name, rows))
            inputs.renew[name, rows] = copy
        return inputs.renew[name, rows]

    def byte_count(self, name: str, function: Mapping) -> int:
        """The bytes of those rows of a buffer that a function uses."""
        used: dict[str, int] = {"tokens": function["rows"], "rows": function["rows"]}
        used |= dict.fromkeys(RESULTS, function["logits"])
        return self._row_bytes(name, used[name] if name in used else self.entries[name]["shape"][0])

    def _row_bytes(self, name: str, rows: int) -> int:
        entry = self.entries[name]
        return byte_count(entry["dtype"], [rows, *entry["shape"][1:]])

    def _copy(
        self, source: MemoryBlock, source_at: int, target: MemoryBlock, target_at: int, count: int
    ) -> ctypes.Structure:
        recorder = CommandRecorder(self.context, 0)
        recorder.begin()
        recorder.copy(source, source_at, target, target_at, count)
        return recorder.end()

    # ---- parts of a function's command buffer

    def record_inputs(self, recorder: CommandRecorder, function: Mapping, slot: int | None) -> None:
        """Records the copies of inputs at the beginning of a run. With a slot, the tokens are copied from those that
        the run before has sampled."""
        inputs = self._inputs[slot]
        if slot is None:
            if self._input_copy:
                recorder.copy(inputs.block, 0, self._input_copy, 0, self._input_copy.nbytes)
            return
        target, begin = self.places["tokens"]
        end = begin + self._input_sizes["tokens"]
        for first, last in ((0, begin), (end, inputs.block.nbytes)):
            if first < last:
                recorder.copy(inputs.block, first, target, first, last - first)
        sampled, offset = self.places["sampled"]
        recorder.copy(sampled, offset, target, begin, self.byte_count("sampled", function))

    def record_late(self, recorder: CommandRecorder, function: Mapping, slot: int | None) -> None:
        """Records the copies of the used rows of LATE inputs, for which `record_inputs` and `before` are too early."""
        if slot is None and not self.copies:
            return
        inputs = self._inputs[slot]
        for name in LATE:
            block, offset = (inputs.places | inputs.table_places)[name]
            recorder.copy(block, offset, *self.places[name], self._row_bytes(name, function["logits"]))

    def record_outputs(self, recorder: CommandRecorder, function: Mapping, slot: int | None) -> None:
        target = self._outputs[slot]
        for name in self._recorded(function, target):
            block, offset = self.places[name]
            recorder.copy(block, offset, target.block, target.at[name], self.byte_count(name, function))

    def _recorded(self, function: Mapping, target: _Outputs) -> Mapping[str, int]:
        """{output: rows} that a run of the function copies to `target`."""
        key = id(function), target is self._outputs[None]  # the id is unique: the manifest keeps all functions alive
        if key not in self._copied:
            made = results_of(function)
            found = {name: self.byte_count(name, function) for name in target.at if name in made}
            small = {name: size for name, size in found.items() if size <= RECORDED or name == ENCODED}
            self._copied[key] = {name: size // self._row_bytes(name, 1) for name, size in small.items()}
        return self._copied[key]

    # ---- the host's side

    def write(self, name: str, values) -> None:
        self._host[name][: len(values)] = values
        self._wrote(name, len(values))

    def fill(self, name: str, rows: int, put: Callable[[np.ndarray], None]) -> None:
        put(self._host[name][:rows])
        self._wrote(name, rows)

    def _wrote(self, name: str, rows: int) -> None:
        if name not in self._table_sizes:
            for inputs in self._inputs.values():
                inputs.stale = True
        else:
            for inputs in (one for one in self._inputs.values() if name in one.table_places and name not in PATCHES):
                inputs.dirty[name] = max(inputs.dirty.get(name, 0), rows)
            self._stale[name] = max(self._stale.get(name, 1), rows)

    def before(self, slot: int | None = None) -> list[ctypes.Structure]:
        """Puts inputs and tables into the memory of a slot, whose last run is done. Returns the submissions that must
        precede the next run: they copy changed tables to the memory that kernels read."""
        inputs = self._inputs[slot]
        inputs.put(self._written, self._host)
        if not self._stale:
            return []
        copied = self._stale if self.copies or inputs is not self._inputs[None] else {}
        found = [self._renewal(inputs, name, rows) for name, rows in copied.items() if name in inputs.table_places]
        self._stale.clear()
        return found

    def late(self, slot: int | None = None) -> None:
        """Puts LATE inputs, written since `before`, into the memory from which `record_late` copies them."""
        self._inputs[slot].put(self._written, self._host)
        for name in LATE:
            self._stale.pop(name, None)

    def add_slots(self) -> None:
        """Allocates the memory of the slots, at the first call. They have no PATCHES, as image encoders do not run
        ahead. Raises OutOfMemory."""
        tables = {name: size for name, size in self._table_sizes.items() if name not in PATCHES}
        for slot in range(len(self._inputs) - 1, SLOTS):
            inputs = _Inputs(self.memory, self._input_sizes, tables, self.entries)
            chosen = {name: self._output_sizes[name] for name in CHOSEN if name in self._output_sizes}
            self._outputs[slot] = _Outputs(self.memory, chosen, self.entries)
            self._inputs[slot] = inputs

    def finished(self, function: Mapping, slot: int | None = None) -> None:
        """To be called when a run is done: `read` then returns its outputs."""
        self._read_from = self._outputs[slot]
        self._rows = dict(self._recorded(function, self._read_from))

    def read(self, name: str, rows: int) -> np.ndarray:
        """The first rows of a buffer, of the run for which `finished` was called last. Valid until the next run."""
        if name not in RESULTS:
            return self._host[name][:rows]
        target = self._read_from if name in self._read_from.at else self._outputs[None]
        if rows > (known := self._rows.get(name, 0)):
            block, offset = self.places[name]
            before = self._row_bytes(name, known)
            new = self._row_bytes(name, rows) - before
            copy = self._copy(block, offset + before, target.block, target.at[name] + before, new)
            self.context.run(copy)
            self.context.release(copy)
            self._rows[name] = rows
        self.memory.invalidate(target.block)
        return target.views[name][:rows]
