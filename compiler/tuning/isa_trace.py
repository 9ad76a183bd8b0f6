"""Follows a wave through a kernel's assembly: how often each instruction runs, and how long the wave waits for memory.

In: assembly in LLVM's syntax (LLVM's own, or RADV's through `radv`), a workgroup's number, a `Machine`. Out: a `Trace`.

Loops count in scalar registers, so the scalar instructions are computed, and the vector ones that scalar registers get
values from (`isa_values.py`); the others are only counted. Of memory the arguments and the tokens' state are known. A
branch that hangs on anything else, or on the lanes' mask, leads where there is more work: nothing is skipped, except
that a loop which it may leave runs once. That is right for kernels whose bounds are constants or come from the state,
as ours do; it ignores lanes that are masked out and bank conflicts.
"""

import functools
import re
from collections import Counter
from dataclasses import dataclass, field

from mlc_amd.compiler.codegen import hsaco
from mlc_amd.compiler.tuning import isa_costs, isa_values
from mlc_amd.compiler.tuning.isa_values import Values, registers

RESERVED = 2  # RADV: registers ahead of the push constants
STEPS = 200_000  # visits of blocks after which a loop is taken for endless
SUBGROUP = re.compile(
    r"s_bfe_u32 \w+, s(\d+), 0x60006"
)  # RADV: the wave's number out of a register behind the workgroup's
WAIT = re.compile(r"(vm|lgkm)cnt\((\d+)\)")
# gfx12: counters of their own, two of which may share an instruction
WAITS = {"loadcnt": ("vm",), "dscnt": ("lgkm",), "kmcnt": ("lgkm",), "loadcnt_dscnt": ("vm", "lgkm")}
# User registers ahead of the address of the arguments, in order: their directive, and how many
AHEAD = (("private_segment_buffer", 4), ("dispatch_ptr", 2), ("queue_ptr", 2))
# Where arguments are made to lie; RADV's pointers to push constants have the upper half that its code gives them
ARGUMENTS, PUSHED, ADDRESS = 1 << 40, 0xFFFF8000_00001000, 8
PACKED = ("gfx90a", "gfx94", "gfx95", "gfx11", "gfx12")  # GPUs that have a workitem's numbers in one register


@dataclass(frozen=True)
class Arguments:
    """A launch's arguments, all addresses. count: of them; state: the place of the state's, None without one; table:
    whether they lie in memory and only the address of that is passed (`spirv.SpirvKernel.table`)."""

    count: int = 0
    state: int | None = None
    table: bool = False

    def memory(self, base: int, state) -> dict[int, int]:
        """Words by address, of arguments from `base` on and of what the state holds."""
        address = [ARGUMENTS + (i + 1 << 24) for i in range(self.count + 1)]
        found, places = {}, [(base, address[self.count :])] if self.table else [(base, address[: self.count])]
        if self.table:
            places.append((address[self.count], address[: self.count]))
        for start, values in places:
            for i, value in enumerate(values):
                found |= {start + ADDRESS * i: value & isa_values.MASK, start + ADDRESS * i + 4: value >> 32}
        if state is not None and self.state is not None:
            found |= {address[self.state] + 4 * i: value & isa_values.MASK for i, value in enumerate(state)}
        return found


@dataclass
class Trace:
    """A wave's way through a kernel.

    clocks    until it ends, if it has the compute unit for itself and every load comes from device memory
    longest   of several waves, of which clocks is the mean: the clocks of the one that takes longest
    busy      clocks by pipe
    counts    executed instructions by mnemonic
    loaded    bytes that its lanes load from memory
    """

    clocks: float = 0
    longest: float = 0
    busy: Counter = field(default_factory=Counter)
    counts: Counter = field(default_factory=Counter)
    loaded: float = 0


class Program:
    """A kernel's instructions, ready to be followed.

    assembly, kernel: the text and the label in it. wave: lanes; grid: workgroups (x, y, z) of the launch. ValueError if
    the text lacks the kernel.
    """

    def __init__(
        self,
        assembly: str,
        kernel: str,
        machine: isa_costs.Machine,
        wave: int,
        grid,
        arguments: Arguments | None = None,
    ):
        self.machine, self.wave, self.grid, self.arguments = machine, wave, grid, arguments or Arguments()
        self.code, self.labels = _instructions(assembly, kernel)
        self.facts = _facts(assembly, kernel)
        self.ids, self.group = _workgroup_registers(self.facts, self.code, self.labels, grid)
        self.watched = self._watched()
        loops = [
            (self.labels[t], i)
            for i, (name, ops) in enumerate(self.code)
            if (t := _target(name, ops)) and self.labels[t] <= i
        ]
        self.exits = {
            i
            for i, (name, ops) in enumerate(self.code)
            if (t := _target(name, ops)) and any(first <= i <= last < self.labels[t] for first, last in loops)
        }
        starts = {0, *self.labels.values(), *(i + 1 for i, (name, ops) in enumerate(self.code) if _target(name, ops))}
        self.blocks = {first: self._block(first, starts) for first in starts if first < len(self.code)}

    def _block(self, first: int, starts: set[int]) -> "_Block":
        block = _Block()
        for i in range(first, len(self.code)):
            if i > first and i in starts:
                block.next = i
                break
            name, operands = self.code[i]
            if name == "s_endpgm" or _target(name, operands):
                block.end, block.next = (name, operands, i), i + 1
                break
            self._add(block, name, operands)
        return block

    def _add(self, block: "_Block", name: str, operands: list[str]) -> None:
        size = _bytes(name)
        pipe, clocks = self.machine.cost(name, self.wave, size)
        block.counts[name] += 1
        if pipe != isa_costs.NONE:
            block.busy[pipe] += clocks
        block.scalar += [one for one in isa_values.parts(name, operands) if self._counts(*one)]
        if name.startswith("s_load"):
            block.events.append(("lgkm", None, isa_costs.SCALAR_CLOCKS))
        elif name.startswith("s_"):
            for queue, most in _waits(name, operands):
                block.events.append((queue, most, 0))
        elif pipe == "memory" and "store" not in name:
            block.events.append(("vm", None, self.machine.latency))
            block.loaded += size * self.wave
        elif pipe == "lds":
            block.events.append(("lgkm", None, isa_costs.LDS_CLOCKS))
        issue = {"memory": self.machine.family.scalar, "lds": 1, isa_costs.NONE: 0}.get(pipe, clocks)
        if issue:
            if block.events and block.events[-1][0] == "issue":
                block.events[-1] = ("issue", block.events[-1][1] + issue, 0)
            else:
                block.events.append(("issue", issue, 0))

    def _watched(self) -> set[int]:
        """Vector registers whose values may get to scalar ones."""
        code = [
            one for name, operands in self.code if name.startswith("v_") for one in isa_values.parts(name, operands)
        ]
        found = {number for one in code if isa_values.reads_vectors(one[0]) for number in isa_values.sources(*one)}
        makes = [(set(isa_values.written(*one)), isa_values.sources(*one)) for one in code]
        while more := {number for made, used in makes if made & found for number in used} - found:
            found |= more
        return found

    def _counts(self, name: str, operands: list[str]) -> bool:
        """Whether an instruction may decide on what scalar registers hold."""
        if name.startswith(("s_", "v_cmp", "v_read")) or isa_values.CARRY.match(name) or "_atomic_" in name:
            return not name.startswith("v_cmpx")
        return any(number in self.watched for number in isa_values.written(name, operands))

    def _start(self, workgroup, wave: int | None, state) -> Values:
        """Registers and memory before the first instruction."""
        memory = self.arguments.memory(PUSHED if self.facts is None else ARGUMENTS, state)
        values = Values(memory, arrival=workgroup[1])
        for register, value in zip(self.ids, [workgroup[axis] for axis in self._axes()], strict=False):
            values.values[register] = value
        values.values |= {"ttmp9": workgroup[0], "ttmp7": workgroup[1] | workgroup[2] << 16, "wave": wave}
        if self.facts is not None:
            first = sum(count for name, count in AHEAD if self.facts.get(f"user_sgpr_{name}") == "1")
            values.write(f"s[{first}:{first + 1}]", ARGUMENTS)
            if self.machine.gpu is not None and self.machine.gpu.name.startswith(PACKED):
                values.packed.add(0)
            elif wave is not None:
                values.lanes[1] = wave
        else:
            self._push(values, memory)
            if wave is not None and self.group is not None:
                values.values[f"s{self.group}"] = wave << 6
        return values

    def _push(self, values: Values, memory: dict[int, int]) -> None:
        """RADV: the push constants' words lie in registers ahead of the workgroup's numbers, all of them, or, behind a
        pointer to them, as many as fit."""
        if not self.ids:
            return
        words, end = 1 if self.arguments.table else self.arguments.count, int(self.ids[0][1:])
        first = end - 2 * words
        if first < RESERVED:
            first = RESERVED + 1
            values.values[f"s{RESERVED}"] = PUSHED & isa_values.MASK
        for i in range(end - first):
            values.values[f"s{first + i}"] = memory.get(PUSHED + 4 * i)

    def run(self, workgroup: tuple[int, int, int], wave: int | None = None, state=None, certain: bool = False) -> Trace:
        """A wave of that workgroup, None: one that does what any of them does; state: as a case has it. ValueError for
        a loop that does not end; certain: also for one whose turns are not known."""
        state = self._start(workgroup, wave, state)
        trace, visits, queues, now, at, left = Trace(), Counter(), {"vm": [], "lgkm": []}, 0.0, 0, set()
        for _ in range(STEPS):
            block = self.blocks[at]
            visits[at] += 1
            for kind, amount, latency in block.events:
                if kind == "issue":
                    now += amount
                elif amount is None:
                    queue = queues[kind]
                    queue.append(max(now + latency, queue[-1]) if queue else now + latency)
                elif len(queues[kind]) > amount:
                    queue = queues[kind]
                    now = max(now, queue[len(queue) - amount - 1])
                    del queue[: len(queue) - amount]
            for name, operands in block.scalar:
                state.execute(name, operands)
            if block.end is None:
                at = block.next
                continue
            name, operands, i = block.end
            if name == "s_endpgm":
                break
            taken = state.branches(name)
            if taken is None:
                if (
                    certain
                    and not name.startswith("s_cbranch_exec")
                    and (i in self.exits or self.labels[_target(name, operands)] <= i)
                ):
                    raise ValueError("the number of a loop's turns is in no scalar register")
                taken = i in self.exits and i in left
                left.add(i)
            at = self.labels[_target(name, operands)] if taken else block.next
        else:
            raise ValueError("a loop of the kernel does not end as far as its scalar registers tell")
        for first, n in visits.items():
            block = self.blocks[first]
            for total, part in ((trace.busy, block.busy), (trace.counts, block.counts)):
                for key, value in part.items():
                    total[key] += value * n
            trace.loaded += block.loaded * n
        trace.clocks = now
        return trace

    def _axes(self) -> list[int]:
        return [axis for axis in range(3) if self.grid[axis] > 1] if len(self.ids) < 3 else [0, 1, 2]


@dataclass
class _Block:
    """Instructions without a branch. events: ("issue", clocks, 0), (queue, None, latency) for what is under way,
    (queue, most, 0) for waits until at most so many are. end: the branch."""

    counts: Counter = field(default_factory=Counter)
    busy: Counter = field(default_factory=Counter)
    scalar: list = field(default_factory=list)
    events: list = field(default_factory=list)
    loaded: float = 0
    end: tuple | None = None
    next: int = 0


# ---- text


def _instructions(assembly: str, kernel: str) -> tuple[list[tuple[str, list[str]]], dict[str, int]]:
    code, labels, inside = [], {}, False
    for line in assembly.splitlines():
        line = line.partition(";")[0].rstrip()
        if found := hsaco.LABEL.match(line):
            local = hsaco.LOCAL_LABEL.match(found[1])
            if not local and inside:
                break
            inside = inside or found[1] == kernel
            if inside and local:
                labels[found[1]] = len(code)
        elif inside and line.startswith("\t.section"):
            break
        elif inside and (found := hsaco.MNEMONIC.match(line)):
            operands = [part.strip() for part in line.strip()[len(found[1]) :].split(",")]
            code.append((found[1], operands))
    if not code:
        raise ValueError(f"the assembly has no kernel {kernel}")
    return code, labels


def _facts(assembly: str, kernel: str) -> dict[str, str] | None:
    """LLVM's directives about a kernel; None for RADV's code, which has none."""
    start = assembly.find(f".amdhsa_kernel {kernel}")
    if start < 0:
        return None
    return dict(re.findall(r"\.amdhsa_(\w+) (\d+)", assembly[start : assembly.index(".end_amdhsa_kernel", start)]))


def _workgroup_registers(facts, code, labels, grid) -> tuple[list[str], int | None]:
    """The scalar registers that hold the workgroup's numbers, in the order of the axes that the kernel asks for. RADV:
    and the number of the one with the wave's number, None where it is not read."""
    if facts is not None:
        first = int(facts["user_sgpr_count"])
        axes = [axis for axis, name in enumerate("xyz") if facts.get(f"system_sgpr_workgroup_id_{name}") == "1"]
        found = [""] * 3
        for place, axis in enumerate(axes):
            found[axis] = f"s{first + place}"
        return found, None
    # RADV: the last registers that live at the start, before the one with the wave's number
    wave = next((int(m[1]) for name, ops in code if (m := SUBGROUP.match(f"{name} {', '.join(ops)}"))), None)
    numbers = [r for r in _inputs(code, labels) if wave is None or r < wave]
    count = sum(extent > 1 for extent in grid)
    return [f"s{r}" for r in numbers[len(numbers) - count :]] if count else [], wave


def _inputs(code, labels) -> list[int]:
    """Numbers of the scalar registers whose values at the start are read, ascending."""
    touched = [_touched(name, operands) for name, operands in code]
    live, before = [0] * (len(code) + 1), None
    while before != live:
        before = list(live)
        for i in reversed(range(len(code))):
            (name, operands), (read, written) = code[i], touched[i]
            after = 0 if name in ("s_branch", "s_endpgm") else live[i + 1]
            if target := _target(name, operands):
                after |= live[labels[target]]
            live[i] = read | after & ~written
    return [i for i in range(live[0].bit_length()) if live[0] >> i & 1]


def _touched(name: str, operands: list[str]) -> tuple[int, int]:
    """Masks of the scalar registers that an instruction reads and writes."""
    masks = [sum(1 << r for r in registers(operand)) for operand in operands]
    if name.startswith(("s_cmp", "s_bitcmp", "v_cmpx")):
        masks.insert(0, 0)
    written, read = masks[:1], masks[1:]
    if isa_values.CARRY.match(name):
        written, read = masks[:2], masks[2:]
    elif name.startswith(("s_addk", "s_mulk", "s_cmov", "s_bitset", "global_store", "ds_")):
        written, read = [], masks
    return functools.reduce(int.__or__, read, 0), functools.reduce(int.__or__, written, 0)


def _target(name: str, operands: list[str]) -> str | None:
    return operands[0] if name.startswith(("s_branch", "s_cbranch")) else None


def _waits(name: str, operands: list[str]) -> list[tuple[str, int]]:
    if name == "s_waitcnt":
        text = " ".join(operands)
        if text in ("0", "0x0"):
            return [("vm", 0), ("lgkm", 0)]
        return [(queue, int(n)) for queue, n in WAIT.findall(text)]
    if name.startswith("s_wait_") and (queues := WAITS.get(name.removeprefix("s_wait_"))):
        value = int(operands[0], 0)
        parts = (value >> 8, value & 0xFF) if len(queues) == 2 else (value,)
        return list(zip(queues, parts, strict=True))
    return []


def _bytes(name: str) -> int:
    """That a lane moves."""
    if not (found := hsaco.MEMORY.match(name)):
        return 4
    width = found[4]
    return (hsaco.WIDTHS.get(width) or int(width) // 8) * (2 if found[3] else 1)
