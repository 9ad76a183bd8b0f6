"""Follows a wave through a kernel's assembly: how often each instruction runs, and how long the wave waits for memory.

In: assembly in LLVM's syntax (LLVM's own, or RADV's through `radv`), a workgroup's number, a `Machine`. Out: a `Trace`.

Loops count in scalar registers, so the scalar instructions are computed, the others only counted. What scalar registers get from memory or
vectors is unknown. A branch that hangs on it, or on the lanes' mask, leads where there is more work: nothing is skipped, except that a
loop which it may leave runs once. That is right for kernels whose bounds are constants, as ours are; it ignores waves that find nothing to
do, lanes that are masked out, and bank conflicts.
"""

import re
from collections import Counter
from dataclasses import dataclass, field

from mlc_amd.compiler.codegen import hsaco
from mlc_amd.compiler.tuning import isa_costs

MASK = 0xFFFFFFFF
STEPS = 200_000  # visits of blocks after which a loop is taken for endless
SUBGROUP = re.compile(r"s_bfe_u32 \w+, s(\d+), 0x60006")  # RADV: the wave's number out of a register behind the workgroup's
WAIT = re.compile(r"(vm|lgkm)cnt\((\d+)\)")
# gfx12: counters of their own, two of which may share an instruction
WAITS = {"loadcnt": ("vm",), "dscnt": ("lgkm",), "kmcnt": ("lgkm",), "loadcnt_dscnt": ("vm", "lgkm")}
REGISTER = re.compile(r"s(\d+)$|s\[(\d+):(\d+)\]$")
NAMES = {"vcc_lo": "vcc", "vcc": "vcc", "exec_lo": "exec", "exec": "exec", "src_scc": "scc", "scc": "scc"}


@dataclass
class Trace:
    """A wave's way through a kernel.

    clocks    until it ends, if it has the compute unit for itself and every load comes from device memory
    busy      clocks by pipe
    counts    executed instructions by mnemonic
    loaded    bytes that its lanes load from memory
    """

    clocks: float = 0
    busy: Counter = field(default_factory=Counter)
    counts: Counter = field(default_factory=Counter)
    loaded: float = 0


class Program:
    """A kernel's instructions, ready to be followed.

    assembly, kernel: the text and the label in it. wave: lanes; grid: workgroups (x, y, z) of the launch. ValueError if the text lacks the
    kernel.
    """

    def __init__(self, assembly: str, kernel: str, machine: isa_costs.Machine, wave: int, grid):
        self.machine, self.wave, self.grid = machine, wave, grid
        self.code, self.labels = _instructions(assembly, kernel)
        self.ids = _workgroup_registers(assembly, kernel, self.code, grid)
        loops = [(self.labels[t], i) for i, (name, ops) in enumerate(self.code) if (t := _target(name, ops)) and self.labels[t] <= i]
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
        if name.startswith("s_") and not name.startswith("s_load"):
            for queue, most in _waits(name, operands):
                block.events.append((queue, most, 0))
            block.scalar.append((name, operands))
        elif name.startswith(("v_cmp", "v_readfirstlane", "v_readlane", "v_add_co", "v_addc")):
            block.scalar.append((name, operands))
        if name.startswith("s_load"):
            block.events.append(("lgkm", None, isa_costs.SCALAR_CLOCKS))
            block.scalar.append((name, operands))
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

    def run(self, workgroup: tuple[int, int, int]) -> Trace:
        """A wave of that workgroup. ValueError for a loop that does not end."""
        state = _Scalars()
        for register, value in zip(self.ids, [workgroup[axis] for axis in self._axes()], strict=False):
            state.values[register] = value
        state.values |= {"ttmp9": workgroup[0], "ttmp7": workgroup[1] | workgroup[2] << 16}
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
    """Instructions without a branch. events: ("issue", clocks, 0), (queue, None, latency) for what is under way, (queue, most, 0) for waits
    until at most so many are. end: the branch."""

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


def _workgroup_registers(assembly: str, kernel: str, code, grid) -> list[str]:
    """The scalar registers that hold the workgroup's numbers, in the order of the axes that the kernel asks for."""
    start = assembly.find(f".amdhsa_kernel {kernel}")
    if start >= 0:
        facts = dict(re.findall(r"\.amdhsa_(\w+) (\d+)", assembly[start : assembly.index(".end_amdhsa_kernel", start)]))
        first = int(facts["user_sgpr_count"])
        axes = [axis for axis, name in enumerate("xyz") if facts.get(f"system_sgpr_workgroup_id_{name}") == "1"]
        registers = [""] * 3
        for place, axis in enumerate(axes):
            registers[axis] = f"s{first + place}"
        return registers
    # RADV: the last registers that are read before they are written, before the one with the wave's number
    wave = next((int(m[1]) for name, ops in code if (m := SUBGROUP.match(f"{name} {', '.join(ops)}"))), None)
    inputs, written = set(), set()
    for name, operands in code:
        sources = operands if name.startswith(("s_cmp", "s_bitcmp", "v_cmp", "global_store", "ds_")) else operands[1:]
        inputs |= {r for operand in sources for r in _registers(operand)} - written
        written |= set(_registers(operands[0])) if operands else set()
    numbers = sorted(r for r in inputs if wave is None or r < wave)
    count = sum(extent > 1 for extent in grid)
    return [f"s{r}" for r in numbers[len(numbers) - count :]] if count else []


def _registers(operand: str) -> range:
    """Numbers of the scalar registers that an operand names."""
    found = REGISTER.match(operand)
    if not found:
        return range(0)
    return range(int(found[1]), int(found[1]) + 1) if found[1] else range(int(found[2]), int(found[3]) + 1)


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


# ---- scalar instructions


class _Scalars:
    """Scalar registers by name; None is unknown."""

    def __init__(self):
        self.values = {"exec": -1 & MASK, "vcc": None, "scc": None}

    def read(self, operand: str, wide: bool = False) -> int | None:
        if found := REGISTER.match(operand):
            if found[1]:
                return self.values.get(operand)
            low, high = self.values.get(f"s{found[2]}"), self.values.get(f"s{int(found[2]) + 1}")
            return None if low is None or high is None else low | high << 32
        if operand in NAMES or operand.startswith("ttmp"):
            return self.values.get(NAMES.get(operand, operand))
        try:
            value = int(operand, 0)
        except ValueError:
            return None
        return value & (MASK << 32 | MASK if wide else MASK)

    def write(self, operand: str, value: int | None) -> None:
        if found := REGISTER.match(operand):
            for i, register in enumerate(_registers(operand)):
                self.values[f"s{register}"] = None if value is None or i > 1 else value >> 32 * i & MASK
            return
        name = NAMES.get(operand, operand)
        if name == "exec":
            return  # lanes that are masked out take part
        if name in ("vcc", "scc") or found is None:
            self.values[name] = value

    def branches(self, name: str) -> bool | None:
        """Whether a branch is taken; None if that is unknown."""
        kind = name.removeprefix("s_cbranch_").removeprefix("s_")
        if kind == "branch":
            return True
        if kind.startswith("exec"):
            return None  # see `Program.exits`
        value = self.values["scc" if kind.startswith("scc") else "vcc"]
        return None if value is None else (value != 0) == (kind in ("scc1", "vccnz"))

    def execute(self, name: str, operands: list[str]) -> None:
        if name.startswith("v_"):
            for operand in operands[:2]:
                if operand in NAMES or REGISTER.match(operand):
                    self.write(operand, None)
                    break
            return
        if name.startswith(("s_wait", "s_nop", "s_delay", "s_clause", "s_barrier", "s_sendmsg", "s_code", "s_set", "s_inst")):
            return
        if name.startswith("s_cmp"):
            self.values["scc"] = self._compare(name, operands)
            return
        if name.startswith("s_cselect"):
            scc = self.values["scc"]
            self.write(operands[0], None if scc is None else self.read(operands[1 if scc else 2], name.endswith("64")))
            return
        if "saveexec" in name:
            self.write(operands[0], None)
            self.values["scc"] = None
            return
        base, _, kind = name.removeprefix("s_").rpartition("_")
        wide = kind in ("b64", "u64", "i64")
        if base in ("addk", "mulk"):
            base, operands = base[:-1], [operands[0], operands[0], operands[1]]
        function = _OPERATIONS.get(base)
        values = [self.read(operand, wide) for operand in operands[1:]]
        if function is None or None in values or not values:
            self.write(operands[0], None)
            self.values["scc"] = self.values["scc"] if base in _KEEPS else None
            return
        signed = [_signed(value, 64 if wide else 32) if kind.startswith("i") or base == "movk" else value for value in values]
        result = function(*signed)
        full = MASK << 32 | MASK if wide else MASK
        self.write(operands[0], result & full)
        if base not in _KEEPS:
            self.values["scc"] = int(not 0 <= result <= full) if base in ("add", "sub") and kind == "u32" else int(result & full != 0)

    def _compare(self, name: str, operands: list[str]) -> int | None:
        relation, kind = name.split("_")[2:]
        values = [self.read(operand, kind.endswith("64")) for operand in operands]
        if None in values:
            return None
        bits = int(kind[1:])
        a, b = (_signed(value, bits) if kind[0] == "i" else value for value in values)
        if name.startswith("s_cmpk") and kind[0] == "i":
            b = _signed(b, 32) if b > 0xFFFF else b
        return int(_RELATIONS[relation](a, b))


def _signed(value: int, bits: int) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> bits - 1 else value


_RELATIONS = {
    "eq": int.__eq__, "lg": int.__ne__, "gt": int.__gt__, "ge": int.__ge__, "lt": int.__lt__, "le": int.__le__,
}  # fmt: skip
_KEEPS = {"mov", "movk", "mul", "add_nc", "sub_nc", "pack_ll"}  # leave scc as it is
_OPERATIONS = {
    "mov": lambda a: a,
    "movk": lambda a: _signed(a, 16) if a <= 0xFFFF else a,
    "add": lambda a, b: a + b,
    "add_co": lambda a, b: a + b,
    "add_nc": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "sub_co": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "lshl": lambda a, b: a << (b & 63),
    "lshr": lambda a, b: a >> (b & 31),
    "ashr": lambda a, b: a >> (b & 31),
    "lshl1_add": lambda a, b: (a << 1) + b,
    "lshl2_add": lambda a, b: (a << 2) + b,
    "lshl3_add": lambda a, b: (a << 3) + b,
    "lshl4_add": lambda a, b: (a << 4) + b,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "not": lambda a: ~a,
    "andn2": lambda a, b: a & ~b,
    "and_not1": lambda a, b: a & ~b,
    "min": min,
    "max": max,
    "bfe": lambda a, b: (a >> (b & 31)) & ((1 << (b >> 16 & 127)) - 1),
}
