"""Runs the SPIR-V modules of any profile without a GPU, and finds what no CPU driver shows: lanes of a wave that race.

In: a module's bytes, a grid, NumPy arrays as its arguments. Out: what the kernel wrote, or a `Fault`:
    a read or write outside of an argument or of shared memory; a read of what was never written
    shared memory that one lane writes and another uses without a barrier between them, be they in one wave or two
    lanes that exchange values, multiply matrices or meet at a barrier while others of their wave are elsewhere
Mesa's CPU driver runs a wave in lockstep, and one wave after the other: a missing barrier has no effect there. A GPU's
lanes may go their own ways. So the emulator does not try orders out: it remembers who wrote and who read, and between
which barriers.

Waves are vectors of NumPy, control flow is that of structured SPIR-V: both sides of a branch run, each for its lanes.
A kernel of 5000 instructions takes a wave a few milliseconds. Matrices: `operations.components`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from mlc_amd.compiler.codegen.spirv.opcodes import SUBGROUP
from tests.dev.spirv import operations
from tests.dev.spirv.program import Instruction, parse
from tests.dev.spirv.shared import Fault, Shared
from tests.dev.spirv.wave import MEET, SHARED, SPAN, Step, Wave, Workgroup


def run(code: bytes, grid: Sequence[int], arrays: Sequence[np.ndarray], wave: int, table: bool = False) -> list:
    """One launch; copies of the arrays after it. Arguments: of `Kernel`."""
    memory = [np.ascontiguousarray(array).reshape(-1).view(np.uint8).copy() for array in arrays]
    Kernel(code, wave).launch(grid, memory, table)
    return [raw.view(x.dtype).reshape(x.shape) for raw, x in zip(memory, arrays, strict=True)]


class Kernel:
    """A module. wave: lanes of a subgroup; 0: the module knows none, and a workgroup is one wave. unit: as of
    `operations.components`."""

    def __init__(self, code: bytes, wave: int, unit: str = "") -> None:
        self.program = program = parse(code)
        self.lanes, self.unit = wave or program.threads, unit
        # of ids: the type of a value, or of what a pointer points to; the storage of a pointer
        self.types = {id: variable.of for id, variable in program.variables.items()}
        self.pointers = {id: variable.storage for id, variable in program.variables.items()}
        for block in program.blocks.values():
            for one in block.body:
                if one.result:
                    self.types[one.result] = one.of
                    if one.of.kind == "pointer":
                        self.pointers[one.result], self.types[one.result] = one.of.storage, one.of.of[0]
        self.steps = {label: [self._step(one) for one in block.body] for label, block in program.blocks.items()}

    def launch(self, grid: Sequence[int], memory: Sequence[np.ndarray], table: bool) -> None:
        """Runs all workgroups, one after the other, on arguments, uint8 arrays, which they change. table: the kernel
        reads the arguments' addresses from memory. Fault: see above."""
        addresses = np.array([(i + 1) * SPAN for i in range(len(memory))], np.int64)
        memory = [*memory, addresses.view(np.uint8)] if table else list(memory)
        addresses = np.array([len(memory) * SPAN], np.int64) if table else addresses
        variables = [(id, one.of) for id, one in self.program.variables.items() if one.storage == SHARED]
        with np.errstate(all="ignore"):
            for z, y, x in np.ndindex(*reversed(tuple(grid))):
                number, shared = np.array([x, y, z], np.int32)[:, None], {id: Shared(of) for id, of in variables}
                known = self.program, self.types, self.pointers, self.steps, self.lanes, self.unit
                self._run(Workgroup(*known, memory, addresses, number, shared))

    def _run(self, group: Workgroup) -> None:
        """The waves of a workgroup, from barrier to barrier."""
        running = [Wave(group, number).run() for number in range(self.program.threads // self.lanes)]
        while running:
            met = [next(one, None) is MEET for one in running]
            if any(met) and not all(met):
                raise Fault("some waves of a workgroup wait at a barrier that others do not reach")
            group.time += 1
            running = running if all(met) else []

    def _step(self, one: Instruction) -> Any:
        """What runs an instruction: a function of the wave; MEET for a barrier of the workgroup."""
        if one.name == "ControlBarrier":
            scope = int(self.program.constants[one.args[0]])
            return partial(Wave.meet, why="a barrier") if scope == SUBGROUP else MEET
        if method := getattr(Wave, f"do_{one.name}", None):
            return partial(method, one=one)
        if one.name.startswith("GroupNonUniform"):
            return partial(Wave.exchange, one=one, name=one.name.removeprefix("GroupNonUniform"))
        return self._arithmetic(one)

    @staticmethod
    def _arithmetic(one: Instruction) -> Step:
        function, args = _function(one)
        result = one.result
        if len(args) == 1:
            (a,) = args

            def step(wave: Wave) -> None:
                wave.values[result] = function(wave.values[a])
        elif len(args) == 2:
            a, b = args

            def step(wave: Wave) -> None:
                wave.values[result] = function(wave.values[a], wave.values[b])
        else:

            def step(wave: Wave) -> None:
                wave.values[result] = function(*[wave.values[x] for x in args])

        return step


def _function(one: Instruction) -> tuple[Callable[..., Any], tuple[int, ...]]:
    """What an instruction without memory computes, of the values of which ids."""
    of, args = one.of, one.args
    if one.name == "ExtInst":
        return operations.EXTENDED[operations.FUNCTIONS[args[1]]], args[2:]
    if one.name in operations.CONVERSIONS:
        convert, to = operations.CONVERSIONS[one.name], of.scalar
        return lambda x: convert(np.asarray(x), to), args
    if one.name == "Bitcast":
        return lambda x: operations.bits_as(x, of.scalar, of.lanes), args
    if one.name not in operations.OPERATIONS:
        raise ValueError(f"instruction {one.name} is not known")
    return operations.OPERATIONS[one.name], args[:2] if one.name == "SDot" else args  # its third says what is packed
