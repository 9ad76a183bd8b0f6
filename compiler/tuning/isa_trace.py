"""Follows a wave through a kernel's assembly: how often each instruction runs, and how long the wave waits for memory.

In: assembly in LLVM's syntax (LLVM's own, or RADV's through `radv`), a workgroup's number, a `Machine`. Out: a `Trace`.

Loops count in scalar registers, so scalar instructions are computed, the others only counted. What scalar registers get
from memory or vector registers is unknown. A branch that depends on it, or on the lanes' mask, is taken so that nothing
is skipped, except that a loop which it may leave runs once. That is right for kernels whose loop bounds are constants:
GEMVs, GEMMs, norms, not attention. Masked lanes and bank conflicts are ignored.
"""

import operator
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

from mlc_amd.compiler.codegen import hsaco
from mlc_amd.compiler.tuning import isa_costs

MASK = 0xFFFFFFFF
STEPS = 5_000_000  # instructions after which a loop is taken for endless
# RADV: the wave's number comes out of the register behind the workgroup's
SUBGROUP = re.compile(r"s_bfe_u32 \w+, s(\d+), 0x60006")
WAIT = re.compile(r"(vm|lgkm)cnt\((\d+)\)")
# gfx12: counters of their own, two of which may share an instruction
WAITS = {"loadcnt": ("vm",), "dscnt": ("lgkm",), "kmcnt": ("lgkm",), "loadcnt_dscnt": ("vm", "lgkm")}
REGISTER = re.compile(r"s(\d+)$|s\[(\d+):(\d+)\]$")
NAMES = {"vcc_lo": "vcc", "exec_lo": "exec", "src_scc": "scc"}
IDLE = ("s_wait", "s_nop", "s_delay", "s_clause", "s_barrier", "s_sendmsg", "s_code", "s_set", "s_inst")
# write scalar registers
SCALAR = ("s_", "v_cmp", "v_readfirstlane", "v_readlane", "v_add_co", "v_addc")


@dataclass
class Trace:
    """A wave's execution of a kernel.

    clocks    until it ends, alone on the compute unit, with every load from device memory
    busy      clocks by pipe
    counts    executed instructions by mnemonic
    """

    clocks: float = 0
    busy: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    counts: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, other: "Trace", factor: float) -> None:
        """Adds another one, so many times."""
        self.clocks += other.clocks * factor
        for total, part in ((self.busy, other.busy), (self.counts, other.counts)):
            for name, value in part.items():
                total[name] += value * factor


class _Step(NamedTuple):
    """An instruction.

    pipe, clocks     that it occupies
    issue            clocks until the wave's next one
    waits            (queue, memory operations that may stay in flight)
    queue, latency   that it joins, "" for none, and clocks until its end
    """

    name: str
    operands: list[str]
    pipe: str
    clocks: float
    issue: float
    waits: list[tuple[str, int]]
    queue: str
    latency: float


class Program:
    """A kernel's instructions, ready to be followed.

    assembly, kernel: the text and the label in it. wave: lanes; grid: workgroups (x, y, z) of the launch. ValueError if
    the text lacks the kernel.
    """

    def __init__(self, assembly: str, kernel: str, machine: isa_costs.Machine, wave: int, grid):
        self.machine, self.wave, self.grid = machine, wave, grid
        code, labels = _instructions(assembly, kernel)
        self.ids = _workgroup_registers(assembly, kernel, code, grid)
        self.steps = [self._step(name, operands) for name, operands in code]
        jumps = [(i, ops[0]) for i, (name, ops) in enumerate(code) if name.startswith(("s_branch", "s_cbranch"))]
        self.jumps = {i: labels[target] for i, target in jumps}
        loops = [(first, last) for last, first in self.jumps.items() if first <= last]
        self.exits = {i for i, to in self.jumps.items() if any(first <= i <= last < to for first, last in loops)}

    def _step(self, name: str, operands: list[str]) -> _Step:
        _, _, size = hsaco.memory_access(name) or ("", "", 4)
        pipe, clocks = self.machine.cost(name, self.wave, size)
        waits, queue, latency = [], "", 0.0
        if name.startswith("s_load"):
            queue, latency = "lgkm", isa_costs.SCALAR_CLOCKS
        elif name.startswith("s_"):
            waits = _waits(name, operands)
        elif pipe == "memory" and "store" not in name:
            queue, latency = "vm", self.machine.latency
        elif pipe == "lds":
            queue, latency = "lgkm", isa_costs.LDS_CLOCKS
        issue = {"memory": self.machine.family.scalar, "lds": 1}.get(pipe, clocks)
        return _Step(name, operands, pipe, clocks, issue, waits, queue, latency)

    def run(self, workgroup: tuple[int, int, int]) -> Trace:
        """A wave of that workgroup. ValueError for a loop that does not end."""
        scalars = _Scalars()
        axes = range(3) if len(self.ids) == 3 else [axis for axis in range(3) if self.grid[axis] > 1]
        scalars.values |= {register: workgroup[axis] for register, axis in zip(self.ids, axes, strict=False)}
        scalars.values |= {"ttmp9": workgroup[0], "ttmp7": workgroup[1] | workgroup[2] << 16}
        visits, queues, now, at, left = Counter(), {"vm": [], "lgkm": []}, 0.0, 0, set()
        for _ in range(STEPS):
            i, step = at, self.steps[at]
            at += 1
            if step.name == "s_endpgm":
                break
            if i in self.jumps:  # takes no time
                taken = scalars.branches(step.name)
                if taken is None:
                    taken = i in self.exits and i in left
                    left.add(i)
                at = self.jumps[i] if taken else at
                continue
            visits[i] += 1
            for name, most in step.waits:
                if (extra := len(queues[name]) - most) > 0:
                    now = max(now, queues[name][extra - 1])
                    del queues[name][:extra]
            if step.queue:
                queue = queues[step.queue]
                queue.append(max([now + step.latency, *queue[-1:]]))
            now += step.issue
            if step.name.startswith(SCALAR):
                scalars.execute(step.name, step.operands)
        else:
            raise ValueError("a loop of the kernel does not end as far as its scalar registers tell")
        trace = Trace(now)
        for i, n in visits.items():
            step = self.steps[i]
            trace.busy[step.pipe] += n * step.clocks
            trace.counts[step.name] += n
        return trace


# ---- text


def _instructions(assembly: str, kernel: str) -> tuple[list[tuple[str, list[str]]], dict[str, int]]:
    """(mnemonic, operands) of a kernel's instructions, and the places among them that its labels name."""
    code, labels = [], {}
    for line in hsaco.lines_of(assembly, kernel):
        line = line.partition(";")[0].rstrip()
        if found := hsaco.LABEL.match(line):
            labels[found[1]] = len(code)
        elif found := hsaco.MNEMONIC.match(line):
            code.append((found[1], [part.strip() for part in line.strip()[len(found[1]) :].split(",")]))
    return code, labels


def _workgroup_registers(assembly: str, kernel: str, code, grid) -> list[str]:
    """The scalar registers that hold the workgroup's numbers, in the order of the axes that the kernel uses."""
    start = assembly.find(f".amdhsa_kernel {kernel}")
    if start >= 0:
        facts = dict(re.findall(r"\.amdhsa_(\w+) (\d+)", assembly[start : assembly.index(".end_amdhsa_kernel", start)]))
        found, register = [""] * 3, int(facts["user_sgpr_count"])
        for axis, name in enumerate("xyz"):
            if facts.get(f"system_sgpr_workgroup_id_{name}") == "1":
                found[axis], register = f"s{register}", register + 1
        return found
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
    return range(int(found[1] or found[2]), int(found[1] or found[3]) + 1)


def _waits(name: str, operands: list[str]) -> list[tuple[str, int]]:
    if name == "s_waitcnt":
        text = " ".join(operands)
        if text in ("0", "0x0"):
            return [("vm", 0), ("lgkm", 0)]
        return [(queue, int(n)) for queue, n in WAIT.findall(text)]
    queues = WAITS.get(name.removeprefix("s_wait_"), ())
    value = int(operands[0], 0) if queues else 0
    return list(zip(queues, (value >> 8, value & 0xFF) if len(queues) == 2 else (value,), strict=False))


# ---- scalar instructions


class _Scalars:
    """Scalar registers by name; None is unknown."""

    def __init__(self):
        self.values = {"exec": MASK, "vcc": None, "scc": None}

    def read(self, operand: str) -> int | None:
        """As an unsigned number; literals may be negative."""
        if numbers := _registers(operand)[:2]:
            known = [value for number in numbers if (value := self.values.get(f"s{number}")) is not None]
            return sum(value << 32 * i for i, value in enumerate(known)) if len(known) == len(numbers) else None
        try:
            return int(operand, 0)
        except ValueError:
            return self.values.get(NAMES.get(operand, operand))

    def write(self, operand: str, value: int | None) -> None:
        numbers = _registers(operand)
        for i, number in enumerate(numbers):
            self.values[f"s{number}"] = None if value is None or i > 1 else value >> 32 * i & MASK
        name = NAMES.get(operand, operand)
        if not numbers and name != "exec":  # masked lanes take part
            self.values[name] = value

    def branches(self, name: str) -> bool | None:
        """Whether a branch is taken; None if that is unknown."""
        kind = name.removeprefix("s_cbranch_").removeprefix("s_")
        if kind == "branch":
            return True
        value = None if kind.startswith("exec") else self.values["scc" if kind.startswith("scc") else "vcc"]
        return None if value is None else (value != 0) == (kind in ("scc1", "vccnz"))

    def execute(self, name: str, operands: list[str]) -> None:
        scc = self.values["scc"]
        if name.startswith("v_"):
            target = next((one for one in operands[:2] if one in ("vcc", "vcc_lo") or REGISTER.match(one)), None)
            if target:
                self.write(target, None)
        elif name.startswith("s_cmp"):
            relation, kind = name.split("_")[2:]
            self.values["scc"] = self._compute(_RELATIONS.get(relation), kind, operands, name.startswith("s_cmpk"))
        elif name.startswith("s_cselect"):
            self.write(operands[0], None if scc is None else self.read(operands[1 if scc else 2]))
        elif "saveexec" in name:
            self.write(operands[0], None)
            self.values["scc"] = None
        elif not name.startswith(IDLE):
            base, _, kind = name.removeprefix("s_").rpartition("_")
            short = base in ("movk", "addk", "mulk")
            if short and base != "movk":
                base, operands = base[:-1], [operands[0], *operands]
            result = self._compute(_OPERATIONS.get(base), kind, operands[1:], short)
            full = (1 << 64 if kind.endswith("64") else 1 << 32) - 1
            self.write(operands[0], None if result is None else result & full)
            if base not in _KEEPS:
                self.values["scc"] = None if result is None else int(result & full != 0)

    def _compute(self, function, kind: str, operands: list[str], short: bool) -> int | None:
        """The function's value of the operands as numbers of that kind ("u32", "i64" ..); short: of 16 bits, where they
        are signed."""
        values = [value for operand in operands if (value := self.read(operand)) is not None]
        if function is None or not operands or len(values) < len(operands):
            return None
        bits = 64 if kind.endswith("64") else 32
        values = [value & (1 << bits) - 1 for value in values]
        if kind.startswith("i"):
            if short and 0x7FFF < values[-1] <= 0xFFFF:
                values[-1] -= 1 << 16
            values = [value - (1 << bits) if value >> bits - 1 == 1 else value for value in values]
        return int(function(*values))


_RELATIONS = {"eq": operator.eq, "lg": operator.ne} | {
    name: getattr(operator, name) for name in ("gt", "ge", "lt", "le")
}
_KEEPS = {"mov", "movk", "mul", "add_nc", "sub_nc", "pack_ll"}  # leave scc as it is
_OPERATIONS = {
    "mov": lambda a: a,
    "movk": lambda a: a,
    "not": lambda a: ~a,
    "mul": operator.mul,
    "lshl": lambda a, b: a << (b & 63),
    "lshr": lambda a, b: a >> (b & 63),
    "ashr": lambda a, b: a >> (b & 63),
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "andn2": lambda a, b: a & ~b,
    "and_not1": lambda a, b: a & ~b,
    "min": min,
    "max": max,
    "bfe": lambda a, b: (a >> (b & 31)) & ((1 << (b >> 16 & 127)) - 1),
    **{name: operator.add for name in ("add", "add_co", "add_nc")},
    **{name: operator.sub for name in ("sub", "sub_co", "sub_nc")},
    **{f"lshl{n}_add": lambda a, b, n=n: (a << n) + b for n in (1, 2, 3, 4)},
}
