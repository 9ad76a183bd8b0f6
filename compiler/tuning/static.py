"""Tuning without a device: how long a kernel takes, from the code that the GPU would run and a model of the GPU.

In: workloads and plans, for rocm archs and for Vulkan profiles of AMD GPUs. Out: `Measured` with runner "static", to
rank plans by. Code is compiled as for an artifact (LLVM; RADV's ACO for Vulkan), a wave is followed through it
(`isa_trace.py`), and the time of a launch is

    seconds = LAUNCH + (memory^2 + latency^2 + sum over pipes of pipe^2)^(1/2)

    memory   bytes that the operator must move (weights, activations, live cache) / bandwidth within reach; times 1 +
             RUN / bytes of a row that GEMV plans read at once (`run_of`)
    latency  what a wave takes alone, waits included, times the rounds in which the workgroups run: workgroups /
             (compute units x those that a unit holds), between that and the next whole number. This is Little's law:
             few waves, few loads under way or many waits in a row leave bandwidth unused
    pipe     clocks that the busiest SIMD (vector ALU, matrix unit, scalar) or compute unit (vector cache, LDS) is
             occupied, for the waves of ceil(workgroups / units) workgroups: the last round counts whole

The square lets what comes second add a little, as it does on hardware, where overlap is never perfect; of five powers
tried, 2 ranks GEMV plans best that were measured on an NVIDIA H200 (Q4_0 and Q4_K). What one unit holds follows from
registers, LDS and waves (`hsaco.occupancy`). A kernel with scratch memory is SCRATCH times slower still. Where the
launches of a call are several their times add up. Constants and their sources: `isa_costs.py`.

Loops that count what the tokens' state says, those of attention, are followed in each state that the kernel is timed
in; the mean counts. There waves and workgroups do different work (causal masks, splits beyond the live tokens, the
split that arrives last and joins them all), so many of them are followed, and `latency` is at least that of the
longest.

Not in the model: which loads hit a cache (all come from device memory, except scalar ones), bank conflicts, dependent
instructions' stalls, dual issue beyond what the compiler paired, clocks under power limits, the order of workgroups and
what starting one takes. So it ranks plans of one workload; its seconds are no promise.

How well it ranks: no AMD GPU has been asked. Against an NVIDIA H200, with RADV's code (Mesa 22.3, for RDNA3) for the
same SPIR-V in place of NVIDIA's, Spearman's rank correlation over a workload's plans; llama3-8b, 256 plans each:

                                                       Q4_0              Q4_K
    GEMV: linear, mean of 4 shapes (21-38 plans)       0.61              0.61      0.38 to 0.74, 0.21 to 0.84
          gate, up and SwiGLU (54 plans)               0.46              0.55
          the same, plans without spills               0.68, 0.61        0.66, 0.79
    decode attention (21 plans)                        0.24              0.18
          plans without spills                         0.95              0.95
    norms, 512 tokens (3 plans within 2 to 20 %)       0.50              0.50
    RoPE and cache write, 512 tokens (3 plans)        -0.50             -0.50
    default plans of 21 kernels, 2 to 72 us            0.96              0.93

RADV keeps registers in memory where NVIDIA's compiler does not, attention's default among them: the model would have
chosen another plan, promised 124 % and lost 17 %. For AMD's GPUs what it sees is what runs. Where it preferred another
GEMV plan to a default tuned by measurement, it promised 0 to 4 % and lost 5, 6 and 37 %; in earlier rounds, with 556
other plans, up to 21 % promised and up to 36 % lost; for GEMMs (0.80, the mean of eight with 5 plans each, Mesa 25) 39
% and 40 %. Mesa 22.3 knows no cooperative matrices: GEMMs and prefill attention were not compared again. Of the pairs
of GEMV plans without spills where it says that one is faster by 25 %, 88 % are so in truth (872 of 996), by 40 % 90 %
(692 of 766); of attention's by 25 % all 44. So only large gains count;
`mlc_amd.tools.dev.static_correlation` compares again.
"""

import shutil
import tempfile
from collections import Counter
from dataclasses import dataclass
from math import ceil, inf, prod
from pathlib import Path

from mlc_amd.compiler.codegen import hsaco, radv
from mlc_amd.compiler.tuning import gate, isa_costs
from mlc_amd.compiler.tuning.build import Builder
from mlc_amd.compiler.tuning.gate import EMULATED, NOWHERE, smaller
from mlc_amd.compiler.tuning.isa_trace import Arguments, Program, Trace
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.measure.candidate import Candidate, read
from mlc_amd.runtime.measure.child import Child, Died
from mlc_amd.schedules.formats import lookup
from mlc_amd.schedules.gpu import arch as archs
from mlc_amd.schedules.gpu import gemv, profiles
from mlc_amd.schedules.gpu.profiles import ADDRESS
from mlc_amd.schedules.tuning.database import Checked, Measured
from mlc_amd.schedules.tuning.session import BATCH
from mlc_amd.schedules.tuning.workload import Workload

POWER = 2
COLUMNS = 1024  # of a GEMM's weights in the emulator
SAMPLES = 12  # workgroups that are followed where they do different work: formats of q, k and v, say
FEW = 64  # of a KV head's waves, or workgroups, all are followed
EACH = 0  # kinds of work where every workgroup and every wave has its own: attention
ARCHS = {"rocm": archs.resolve, "vulkan": profiles.resolve}
# What the emulator cannot run is built with the same plan for a GPU that has the same wave size and the same
# instructions for dot products.
STAND_IN = "gfx1100"
KNOWN = ("gfx11", "gfx12", "gfx90a", "gfx94", "gfx95")


@dataclass(frozen=True)
class Code:
    """One launch. kernel: registers and memory; assembly: LLVM's syntax, with the label kernel.name."""

    kernel: hsaco.Kernel
    assembly: str
    grid: tuple[int, int, int]
    threads: int
    arguments: Arguments | None = None


@dataclass(frozen=True)
class Estimate:
    """Seconds of a call, and of what it consists, of all launches: "memory", "latency", pipes, "launch". waves: that a
    SIMD holds; of the launch that holds fewest."""

    seconds: float
    parts: dict[str, float]
    waves: int
    launches: list[tuple[Code, Trace]]


def run_of(workload, plan, arch) -> float:
    """Bytes that lie side by side in memory among those that a wave of a GEMV loads at once; of several weights, the
    first. Infinite for other kernels: theirs is no stream."""
    args = workload.args
    if args.get("m") != 1 or workload.op not in ("linear", "gate_up_swiglu"):
        return inf
    if workload.op == "linear":
        fmt, k = lookup(args["segments"][0][0]), args["k"]
        (used, *_), (split, *_) = gemv.linear_plans([(lookup(name), n) for name, n in args["segments"]], k, arch, plan)
        lanes = split.lanes
    else:
        fmt, k = lookup(args["gate"]), args["k"]
        used = gemv.gate_up_plan([fmt, lookup(args["up"])], args["n"], k, arch, plan)
        lanes = used.lanes
    row = k * fmt.block_bytes / fmt.block
    once = lanes * used.unroll * row / gemv.units_of([fmt], k)
    return once if once < row else used.rows * row  # rows follow one another


def estimate(
    codes: list[Code], bytes_: float, machine: isa_costs.Machine, kinds: int = 1, run: float = inf, state=None
) -> Estimate:
    """How long a call takes that launches `codes` one after the other and moves so many bytes.

    kinds: of work among a launch's workgroups, see `follow`; state: the tokens' state, None: not known. run: see
    `run_of`. ValueError for a kernel that does not fit the GPU or cannot be followed.
    """
    return combine([(code, follow(code, machine, kinds, state)) for code in codes], bytes_, machine, run)


def of_cases(
    codes: list[Code], workload: Workload, cases: list[dict], machine: isa_costs.Machine, run: float = inf
) -> Estimate:
    """The mean of the cases that a candidate is timed in (`candidate.json`). launches: of the last one."""
    kinds = EACH if "attention" in workload.op else len(workload.args.get("segments", [0]))
    found = [estimate(codes, case["bytes"], machine, kinds, run, case["state"]) for case in cases]
    parts = Counter()
    for one in found:
        parts.update({name: value / len(found) for name, value in one.parts.items()})
    return Estimate(sum(one.seconds for one in found) / len(found), dict(parts), found[0].waves, found[-1].launches)


def combine(
    launches: list[tuple[Code, Trace]], bytes_: float, machine: isa_costs.Machine, run: float = inf
) -> Estimate:
    """`estimate`, of launches whose waves' traces are known."""
    parts, waves, seconds = {}, [], 0.0
    memory = bytes_ * (1 + isa_costs.RUN / run) / len(launches) / machine.bandwidth
    for code, trace in launches:
        held, limit = machine.held(code.kernel, code.threads)
        if held == 0:
            raise ValueError(f"a workgroup needs more {limit} than a compute unit has")
        times = _times(code, trace, held, machine) | {"memory": memory}
        slow = isa_costs.SCRATCH if code.kernel.scratch or code.kernel.vgpr_spills else 1.0
        seconds += isa_costs.LAUNCH + slow * sum(time**POWER for time in times.values()) ** (1 / POWER)
        for name, time in (times | {"launch": isa_costs.LAUNCH}).items():
            parts[name] = parts.get(name, 0.0) + time
        waves.append(held)
    return Estimate(seconds, parts, min(waves), list(launches))


def follow(code: Code, machine, kinds: int = 1, state=None) -> Trace:
    """The mean of the launch's waves, of which some are followed: one; SAMPLES where there are several kinds of work.
    With EACH all of a KV head's, of many one of each workgroup, of very many those of SAMPLES workgroups. longest:
    clocks of the one that takes longest."""
    program = Program(code.assembly, code.kernel.name, machine, code.kernel.wave, code.grid, code.arguments)
    places = _places(code, kinds)
    mean = Trace()
    for place, wave in places:
        one = program.run(place, wave, state, certain=kinds == EACH and state is not None)
        mean.clocks += one.clocks / len(places)
        mean.longest = max(mean.longest, one.clocks)
        mean.loaded += one.loaded / len(places)
        for total, part in ((mean.busy, one.busy), (mean.counts, one.counts)):
            for name, value in part.items():
                total[name] += value / len(places)
    return mean


def _places(code: Code, kinds: int) -> list[tuple[tuple[int, int, int], int | None]]:
    """(workgroup, wave or None for any) of the waves to follow."""
    x, y, _ = code.grid
    if kinds != EACH:
        count = min(SAMPLES if kinds > 1 else 1, prod(code.grid))
        numbers = [int((i + 0.5) / count * prod(code.grid)) for i in range(count)]
        return [((number % x, number // x % y, number // (x * y)), None) for number in numbers]
    # the first axis is the KV head's: all of them do the same
    waves = -(-code.threads // code.kernel.wave)
    if y * waves <= FEW:
        return [((x // 2, i, 0), wave) for i in range(y) for wave in range(waves)]
    count = y if y <= FEW else SAMPLES
    return [((x // 2, int((i + 0.5) / count * y), 0), i % waves) for i in range(count)]


def _times(code: Code, trace: Trace, held: int, machine) -> dict[str, float]:
    """Seconds by what takes them, memory's bandwidth apart."""
    simds, groups, waves = machine.family.simds, prod(code.grid), -(-code.threads // code.kernel.wave)
    fits = max(1, held * simds // waves)
    rounds = groups / (machine.units * fits)
    rounds = (max(1.0, rounds) + ceil(rounds)) / 2
    most = ceil(groups / machine.units) * waves  # of a compute unit
    # workgroups smaller than a unit's SIMDs share them
    simd = most / simds if waves >= simds else ceil(groups * waves / (machine.units * simds))
    miss = 1 + (code.kernel.code > isa_costs.CODE_CACHE) * (isa_costs.CODE_MISS - 1)
    clocks = {name: miss * simd * trace.busy[name] for name in ("valu", "matrix", "salu")}
    clocks |= {name: most * trace.busy[name] for name in ("memory", "lds")}
    times = {("cache" if name == "memory" else name): n / machine.clock for name, n in clocks.items() if n}
    return times | {"latency": max(rounds * trace.clocks, trace.longest) / machine.clock}


# ---- candidates


def codes_of(candidates: list[Candidate], arch) -> list[list[Code] | str]:
    """The launches of each candidate as the GPU would run them, or why there are none. UserError without the compiler
    that it takes."""
    if arch.api == "rocm":
        return [_of_hsaco(candidate) for candidate in candidates]
    shaders, places = [], []
    for i, candidate in enumerate(candidates):
        data = candidate.code.read_bytes()
        for j, step in enumerate(candidate.steps):
            first, size = step["code"]
            push = ADDRESS if step["table"] else ADDRESS * len(step["args"])
            shaders.append(radv.Shader(f"k{i}_{j}", data[first : first + size], tuple(step["block"]), push))
            places.append((i, step))
    report = radv.statistics(shaders, arch) if shaders else None
    found: list = [[] for _ in candidates]
    for shader, (i, step) in zip(shaders, places, strict=True):
        compiled = report.kernels.get(shader.name)
        if isinstance(found[i], str):
            continue
        if compiled is None or not compiled.assembly:
            found[i] = report.refused.get(
                shader.name, "the driver shows no assembly; install one that was built with a disassembler"
            )
        else:
            found[i].append(_code(candidates[i], step, compiled.kernel, compiled.assembly))
    return found


def _of_hsaco(candidate: Candidate) -> list[Code]:
    kernels, assembly = hsaco.parse(candidate.code.read_bytes()).kernels, candidate.code.with_suffix(".s").read_text()
    return [_code(candidate, step, kernels[step["symbol"]], assembly) for step in candidate.steps]


def _code(candidate: Candidate, step: dict, kernel: hsaco.Kernel, assembly: str) -> Code:
    place = next((i for i, param in enumerate(candidate.params) if param.role == "state"), None)
    state = step["args"].index(place) if place in step["args"] else None
    arguments = Arguments(len(step["args"]), state, step.get("table", False))
    return Code(kernel, assembly, tuple(step["grid"]), prod(step["block"]), arguments)


class Static:
    """What a session measures with where there is no device: `measure` and `gate`. A context manager.

    kind: "rocm" or "vulkan"; arch: its name. workers: processes that compile. emulator: the module of a program that
    compares two candidates for a GPU that is not here (mlc_amd.tools.dev.emulated_pair says how it is asked); without
    one no plan passes the gate. UserError for an arch without a model.
    """

    runner = "static"

    def __init__(self, kind: str, arch: str, workers: int | None = None, emulator: str | None = None):
        if kind not in ARCHS:
            raise UserError(f"static tuning is for AMD GPUs, not for target {kind}; measure on this machine instead")
        self.kind, self.arch = kind, ARCHS[kind](arch)
        self.machine = isa_costs.machine(self.arch)
        self.root = Path(tempfile.mkdtemp(prefix="mlc-amd-static-"))
        self.builder = Builder(kind, arch, self.root, workers)
        self._stand_in: Builder | None = None
        self._emulator = Child(emulator) if emulator else None  # starts when it is first asked

    def __enter__(self) -> "Static":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        self.builder.close()
        for other in (self._stand_in, self._emulator):
            if other:
                other.close()
        shutil.rmtree(self.root, ignore_errors=True)

    def estimates(self, jobs, progress=lambda done, total: None) -> list[Estimate | str]:
        """Of each (workload, plan), or why there is none."""
        built = self.builder.build(jobs, progress)
        candidates = [read(folder) for folder, error in built if error is None]
        codes, found = iter(zip(candidates, codes_of(candidates, self.arch), strict=True)), []
        for (workload, plan), (folder, error) in zip(jobs, built, strict=True):
            if error is None:
                candidate, code = next(codes)
                found.append(code if isinstance(code, str) else self._estimate(workload, plan, candidate, code))
                shutil.rmtree(folder)
            else:
                found.append(error)
        return found

    def _estimate(self, workload, plan, candidate: Candidate, codes: list[Code]) -> Estimate | str:
        try:
            return of_cases(codes, workload, candidate.cases, self.machine, run_of(workload, plan, self.arch))
        except ValueError as error:
            return str(error)

    def batch(self) -> int:
        """How many plans to rank together."""
        return BATCH

    def measure(self, jobs, progress=lambda done, total: None) -> list[Measured]:
        """A Measured for each (workload, plan), in order."""
        facts = {"device": f"model of {self.arch.name}", "runner": self.runner}
        found = self.estimates(jobs, progress)
        return [
            Measured(None, one, **facts) if isinstance(one, str) else Measured(one.seconds, **facts) for one in found
        ]

    def gate(self, workload, plan) -> Checked:
        """Whether a plan's kernel computes what the untuned one does, in the emulator, with a smaller matrix where
        there is a large one. For GPUs that the emulator does not know, the same plan built for STAND_IN."""
        name = self.arch.name if self.kind == "rocm" and self.arch.name.startswith(KNOWN) else STAND_IN
        if self._emulator is None:
            return Checked("", False, error=NOWHERE.format(f"GPU for {self.arch.name}"))
        if name != self.arch.name and self._stand_in is None:
            self._stand_in = Builder("rocm", STAND_IN, self.root / "stand-in", 1)
        builder = self._stand_in or self.builder
        for tokens in gate.TOKENS:
            small = smaller(workload, tokens)
            if small.args.get("m", 1) > 1 and small.args.get("k", 0) > COLUMNS:  # steps of a GEMM's loop, all alike
                small = Workload(small.op, small.args | {"k": COLUMNS})
            built = builder.build([(small, None), (small, plan)])
            if not (errors := [error for _, error in built if error]):
                break
        else:
            return Checked("", False, error=errors[0])
        where = "emulator (reduced shape)" if name == self.arch.name else f"emulator (reduced shape, built for {name})"
        try:
            self._emulator.send({"compare": [str(folder) for folder, _ in built]})
            answer = self._emulator.receive(EMULATED)
        except Died as error:
            return Checked(where, False, error=f"in the emulator it {error}")
        finally:
            for folder, _ in built:
                shutil.rmtree(folder, ignore_errors=True)
        return Checked(where, not answer["wrong"], answer["error"], "; ".join(answer["wrong"]))
