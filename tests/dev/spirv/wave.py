"""One wave of a workgroup: control flow and the instructions that touch memory, or other lanes.

In: a `Kernel` (emulator.py) and its arguments. Out: what the wave writes; it stops at barriers of the workgroup.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlc_amd.compiler.codegen.spirv.opcodes import NON_PRIVATE, STORAGE, SUBGROUP
from tests.dev.spirv import operations
from tests.dev.spirv.program import Block, Instruction, Program, Type, Variable
from tests.dev.spirv.shared import Fault, Shared

SPAN = 1 << 40  # of addresses, that each argument has
PHYSICAL, SHARED, PUSHED = (STORAGE[name] for name in ("PhysicalStorageBuffer", "Workgroup", "PushConstant"))
MEET = "meet"  # in place of an instruction: the waves of the workgroup wait for each other
MATRIX = 1 << 20  # and more: numbers of the lanes that load and store matrices, none of the real ones

Step = Callable[["Wave"], None]


@dataclass
class Workgroup:
    """What its waves share.

    types, pointers: of ids, the type of a value or of what a pointer points to, and a pointer's storage. steps: what
    runs a block's instructions, `Step` or MEET, by its label. lanes: of a wave. unit: whose matrices they are.
    memory: the arguments, at these addresses. number: (x, y, z). shared: variables. time: barriers so far.
    """

    program: Program
    types: dict[int, Type]
    pointers: dict[int, int]
    steps: dict[int, list[Any]]
    lanes: int
    unit: str
    memory: list[np.ndarray]
    addresses: np.ndarray
    number: np.ndarray
    shared: dict[int, Shared]
    time: int = 0


class Wave:
    """One wave of a workgroup. values: of ids. mask: its lanes that run. came: the block that each lane comes from."""

    def __init__(self, group: Workgroup, number: int) -> None:
        self.group, self.number, self.time = group, number, 0
        lanes = group.lanes
        self.lane = np.arange(lanes, dtype=np.int32)
        self.own = self.lane + number * lanes
        self.values: list[Any] = [None] * group.program.bound
        self.cells: dict[int, np.ndarray] = {}
        self.mask, self.full, self.came = np.ones(lanes, bool), True, np.zeros(lanes, np.int64)
        for id, value in group.program.constants.items():
            self.values[id] = value
        for id, variable in group.program.variables.items():
            self.values[id] = (id, None)
            if variable.builtin:
                self.cells[id] = self._builtin(variable)

    def _builtin(self, variable: Variable) -> np.ndarray:
        x, y, _ = self.group.program.size
        return {
            "WorkgroupId": self.group.number,
            "LocalInvocationId": np.stack([self.own % x, self.own // x % y, self.own // (x * y)]).astype(np.int32),
            "SubgroupId": np.int32(self.number),
            "SubgroupLocalInvocationId": self.lane,
        }[variable.builtin]

    # ---- control flow

    def run(self) -> Iterator[str]:
        """The whole function; stops at barriers of the workgroup."""
        yield from self._region(self.group.program.first, 0)

    def _set(self, mask: np.ndarray) -> None:
        self.mask, self.full = mask, bool(mask.all())

    def _block(self, label: int) -> Iterator[str]:
        for step in self.group.steps[label]:
            if step is MEET:
                self.meet("a barrier of the workgroup")
                yield MEET
            else:
                step(self)

    def _region(self, label: int, stop: int) -> Iterator[str]:
        """The blocks from `label` on to `stop`, for the lanes of the mask, which is the same after them."""
        mask = self.mask
        while label != stop:
            block = self.group.program.blocks[label]
            if block.merge is not None and block.merge.name == "LoopMerge":
                yield from self._loop(label, block)
                label = block.merge.args[0]
                self._set(mask)
                continue
            yield from self._block(label)
            end = block.end
            if end.name == "Return":
                return
            self.came[self.mask] = label
            if end.name == "Branch":
                label = end.args[0]
                continue
            assert block.merge is not None
            merge, condition = block.merge.args[0], self._flags(end.args[0])
            for target, taken in ((end.args[1], mask & condition), (end.args[2], mask & ~condition)):
                if target != merge and taken.any():
                    self._set(taken)
                    yield from self._region(target, merge)
            self._set(mask)
            label = merge

    def _loop(self, header: int, block: Block) -> Iterator[str]:
        """As `Asm.loop` writes loops: a header with phis, a test, a body, a block that goes back."""
        assert block.merge is not None
        following, test = block.merge.args[1], block.end.args[0]
        while True:
            yield from self._block(header)
            self.came[self.mask] = header
            yield from self._block(test)
            self.came[self.mask] = test
            end = self.group.program.blocks[test].end
            going = self.mask & self._flags(end.args[0])
            if not going.any():
                return
            self._set(going)
            yield from self._region(end.args[1], following)
            self._set(going)
            yield from self._block(following)
            self.came[self.mask] = following

    def _flags(self, id: int) -> np.ndarray:
        return np.broadcast_to(self.values[id], self.mask.shape)

    def meet(self, why: str) -> None:
        """All lanes of the wave are here."""
        if not self.full:
            raise Fault(f"{why} that {int(self.mask.sum())} of {len(self.mask)} lanes of a wave reach")
        self.time += 1

    def _together(self, why: str) -> None:
        if not self.full:
            raise Fault(f"{why} in {int(self.mask.sum())} of {len(self.mask)} lanes of a wave")

    def do_Phi(self, one: Instruction) -> None:
        found = None
        for value, label in zip(one.args[::2], one.args[1::2], strict=True):
            here = self.came == label
            if here.any():
                new = self.values[value]
                found = np.where(here, new, new if found is None else found)
        if self.values[one.result] is not None and not self.full:
            found = np.where(self.mask, found, self.values[one.result])
        self.values[one.result] = found

    # ---- values

    def do_CompositeConstruct(self, one: Instruction) -> None:
        if one.of.kind == "matrix":
            self.values[one.result] = self._filled(one.of, self.values[one.args[0]])
            return
        parts = [np.atleast_1d(self.values[arg]) for arg in one.args]
        lanes = max(part.shape[-1] for part in parts)
        rows = [np.broadcast_to(part, (*part.shape[:-1], lanes)) for part in parts]
        self.values[one.result] = np.concatenate([row if row.ndim == 2 else row[None] for row in rows])

    def do_CompositeExtract(self, one: Instruction) -> None:
        self.values[one.result] = self.values[one.args[0]][one.args[1]]

    def do_MemoryBarrier(self, one: Instruction) -> None:
        if int(self.group.program.constants[one.args[0]]) == SUBGROUP:
            self.meet("a barrier")

    def exchange(self, one: Instruction, name: str) -> None:
        """Instructions whose lanes see others' values. Shuffles need those lanes only, reductions and votes all."""
        args, lanes = one.args[1:], self.mask.shape
        if name in operations.REDUCTIONS:
            self._together("values are reduced")
            values = np.broadcast_to(self.values[args[1]], lanes)
            self.values[one.result] = np.asarray(operations.REDUCTIONS[name](values))
            return
        values = np.broadcast_to(self.values[args[0]], lanes)
        if name == "Any":
            self._together("lanes vote")
            self.values[one.result] = np.bool_(values.any())
            return
        other = 0 if name == "BroadcastFirst" else self.values[args[1]]
        other = np.broadcast_to(self.lane ^ other if name == "ShuffleXor" else other, lanes)
        if not self.mask[other[self.mask]].all():
            raise Fault("a value is taken from a lane that is elsewhere")
        self.values[one.result] = values[other % len(values)]

    # ---- pointers

    def do_ConvertUToPtr(self, one: Instruction) -> None:
        self.values[one.result] = np.asarray(self.values[one.args[0]])

    def do_AccessChain(self, one: Instruction) -> None:
        base, *indices = one.args
        pointer = self.values[base]
        if self.group.pointers[base] != PHYSICAL:
            self.values[one.result] = pointer[0], self.values[indices[0]]
            return
        of = self.group.types[base]
        for index in indices:
            number = np.asarray(self.values[index])
            if of.kind == "struct":
                pointer, of = pointer + of.offsets[int(number)], of.of[int(number)]
            else:
                pointer, of = pointer + number.astype(np.int64) * of.stride, of.of[0]
        self.values[one.result] = pointer

    def _places(self, pointer, of: Type) -> tuple[np.ndarray, np.ndarray]:
        """(an argument's bytes as elements of a type, the active lanes' numbers of elements)."""
        address = np.broadcast_to(pointer, self.mask.shape)[self.mask]
        argument, size = int(address[0]) // SPAN - 1, of.scalar.itemsize
        if not 0 <= argument < len(self.group.memory):
            raise Fault("an address that no argument has")
        raw = self.group.memory[argument]
        offset = address - (argument + 1) * SPAN
        if (offset < 0).any() or (offset + size * of.lanes > len(raw)).any():
            raise Fault(
                f"bytes {int(offset.min())} to {int(offset.max()) + size * of.lanes} of argument {argument}, which has "
                f"{len(raw)}"
            )
        if (offset % (size * of.lanes if of.lanes != 3 else size)).any():
            raise Fault(f"an address of argument {argument} that is no multiple of {size * of.lanes}")
        return raw[: len(raw) // size * size].view(of.scalar), offset // size

    def do_Load(self, one: Instruction) -> None:
        pointer, of = self.values[one.args[0]], one.of
        storage = self.group.pointers[one.args[0]]
        if storage == PHYSICAL:
            elements, at = self._places(pointer, of)
            found = np.zeros((of.lanes, len(self.mask)), of.scalar)
            for i in range(of.lanes):
                found[i, self.mask] = elements[at + i]
            self.values[one.result] = found if of.kind == "vector" else found[0]
        elif storage == SHARED:
            self._ordered(one.args[1:])
            at = np.broadcast_to(pointer[1], self.mask.shape)[self.mask]
            values = self.group.shared[pointer[0]].read(at, self.own[self.mask], self)
            found = np.zeros((*values.shape[1:], len(self.mask)), values.dtype)
            found[..., self.mask] = values.T
            self.values[one.result] = found
        elif storage == PUSHED:
            self.values[one.result] = self.group.addresses[int(pointer[1])]
        elif pointer[0] not in self.cells:
            raise Fault("a variable is read that was never written")
        else:
            cell = self.cells[pointer[0]]
            self.values[one.result] = (cell if pointer[1] is None else self._cell(cell, pointer[1])).copy()

    def _ordered(self, operands) -> None:
        """Where the module has Vulkan's memory model, barriers order only what says so."""
        if self.group.program.vulkan_model and not (operands and operands[0] & NON_PRIVATE):
            raise Fault("an access to shared memory that barriers do not order")

    def _cell(self, cell: np.ndarray, index) -> np.ndarray:
        if np.ndim(index) == 0 or (index == index[0]).all():
            place = int(np.ravel(index)[0])
            if not 0 <= place < len(cell):
                raise Fault(f"element {place} of {len(cell)} of a variable")
            return cell[place]
        return cell[np.clip(index, 0, len(cell) - 1), self.lane]

    def do_Store(self, one: Instruction) -> None:
        target, value = one.args[0], self.values[one.args[1]]
        pointer, storage, of = self.values[target], self.group.pointers[target], self.group.types[target]
        if storage == PHYSICAL:
            elements, at = self._places(pointer, of)
            rows = np.broadcast_to(value, (of.lanes, len(self.mask)))
            for i in range(of.lanes):
                elements[at + i] = rows[i, self.mask]
        elif storage == SHARED:
            self._ordered(one.args[2:])
            at = np.broadcast_to(pointer[1], self.mask.shape)[self.mask]
            values = np.broadcast_to(value, (*np.shape(value)[:-1], len(self.mask)))[..., self.mask].T
            self.group.shared[pointer[0]].write(at, values, self.own[self.mask], self)
        else:
            self._set_cell(pointer, of, value)

    def _set_cell(self, pointer, of: Type, value) -> None:
        id, index = pointer
        if index is None:
            if of.kind == "matrix" and np.ndim(value) < 2:
                value = self._filled(of, value)
            old = self.cells.get(id)
            value = np.broadcast_to(value, (*np.shape(value)[:-1], len(self.mask)))
            self.cells[id] = value.copy() if self.full or old is None else np.where(self.mask, value, old)
            return
        whole = self.group.program.variables[id].of
        if id not in self.cells:
            count = whole.count or whole.shape[0] * whole.shape[1] // len(self.mask)
            self.cells[id] = np.zeros((count, len(self.mask)), whole.scalar)
        cell = self.cells[id]
        if np.ndim(index) and not (index == index[0]).all():
            cell[index[self.mask], self.lane[self.mask]] = np.broadcast_to(value, self.mask.shape)[self.mask]
            return
        place = int(np.ravel(index)[0])
        if not 0 <= place < len(cell):
            raise Fault(f"element {place} of {len(cell)} of a variable")
        cell[place] = value if self.full else np.where(self.mask, value, cell[place])

    def do_AtomicIAdd(self, one: Instruction) -> None:
        pointer, value = self.values[one.args[0]], np.broadcast_to(self.values[one.args[3]], self.mask.shape)
        found = np.zeros(len(self.mask), one.of.scalar)
        if self.group.pointers[one.args[0]] == SHARED:
            at = np.broadcast_to(pointer[1], self.mask.shape)[self.mask]
            found[self.mask] = self.group.shared[pointer[0]].add(at, value[self.mask], self.own[self.mask], self)
            self.values[one.result] = found
            return
        elements, at = self._places(pointer, one.of)
        for lane, place in zip(np.flatnonzero(self.mask), at, strict=True):
            found[lane] = elements[place]
            elements[place] += value[lane]
        self.values[one.result] = found

    # ---- cooperative matrices

    def _filled(self, of: Type, value) -> np.ndarray:
        count = len(self._places_in(of.shape)[0])
        return np.broadcast_to(np.asarray(value, of.scalar), (count, len(self.mask))).copy()

    def do_CooperativeMatrixLengthKHR(self, one: Instruction) -> None:
        self.values[one.result] = np.int32(len(self._places_in(self.group.program.types[one.args[0]].shape)[0]))

    def _places_in(self, shape: tuple[int, int, int]) -> tuple[np.ndarray, np.ndarray]:
        """(row, column) of the lanes' components of such a matrix."""
        return operations.components(shape, len(self.mask), self.group.unit)

    def do_CooperativeMatrixMulAddKHR(self, one: Instruction) -> None:
        self._together("matrices are multiplied")
        a, b, c = one.args[:3]
        shapes = [self.group.types[id].shape for id in (a, b, c)]
        values = (self.values[id] for id in (a, b, c))
        self.values[one.result] = operations.product(*values, shapes, len(self.mask), self.group.unit)

    def _matrix_memory(self, of: Type, target: int, layout: int, stride: int, operands):
        """Where a matrix is: (numbers of its components in memory or shared memory, [rows, columns]; the memory as
        components and None, or None and the `Shared`; components of what the pointer points to)."""
        self._together("a matrix is loaded or stored")
        pointer, pointee = self.values[target], self.group.types[target]
        unit = pointee.lanes * pointee.scalar.itemsize // of.scalar.itemsize
        steps, (row, column) = int(np.ravel(self.values[stride])[0]) * unit, np.indices(of.shape[:2])
        by_rows = int(self.group.program.constants[layout]) == 0
        places = row * steps + column if by_rows else column * steps + row
        if self.group.pointers[target] == PHYSICAL:
            address = np.broadcast_to(pointer, self.mask.shape)
            self._same(address)
            elements, at = self._places(address, pointee)
            whole, first = elements.view(of.scalar), int(at[0]) * unit // pointee.lanes
            if first + places.max() >= len(whole):
                raise Fault("a matrix outside of an argument")
            return first + places, whole, None, unit
        self._ordered(operands)
        self._same(np.broadcast_to(pointer[1], self.mask.shape))
        return int(np.ravel(pointer[1])[0]) * unit + places, None, self.group.shared[pointer[0]], unit

    def _same(self, pointer: np.ndarray) -> None:
        if (pointer != pointer[0]).any():
            raise Fault("a matrix at several addresses")

    def do_CooperativeMatrixLoadKHR(self, one: Instruction) -> None:
        of = one.of
        target, layout, stride, *operands = one.args
        places, memory, shared, unit = self._matrix_memory(of, target, layout, stride, operands)
        if shared is not None:
            units = np.unique(places // unit)
            shared.read(units, np.full(len(units), MATRIX + self.number), self)
            memory = shared.values.reshape(-1).view(of.scalar)
        assert memory is not None
        self.values[one.result] = memory[places][self._places_in(of.shape)]

    def do_CooperativeMatrixStoreKHR(self, one: Instruction) -> None:
        target, object, layout, stride, *operands = one.args
        of = self.group.types[object]
        places, memory, shared, unit = self._matrix_memory(of, target, layout, stride, operands)
        matrix = operations.whole(self.values[object], of.shape, self._places_in(of.shape))
        if memory is not None:
            memory[places] = matrix
            return
        assert shared is not None
        units = np.unique(places // unit)
        if len(np.unique(places)) != len(units) * unit:
            raise Fault("a matrix that fills a part of a vector in shared memory, or a place twice")
        found = shared.values.reshape(-1).view(of.scalar).copy()
        found[places] = matrix
        values = found.view(shared.values.dtype).reshape(shared.values.shape)[units]
        shared.write(units, values, np.full(len(units), MATRIX + self.number), self)
