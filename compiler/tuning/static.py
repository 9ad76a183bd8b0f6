"""Ranking plans without a device: how long a kernel takes, from its machine code and a model of the GPU.

In: workloads and plans, for rocm archs and for Vulkan profiles of AMD GPUs. Out: `Measured` with runner "static". Code
is compiled as for an artifact (LLVM; RADV's ACO for Vulkan), a wave is followed through it (`isa_trace.py`), and the
time of a launch is

    seconds = LAUNCH + (memory^2 + latency^2 + sum over pipes of pipe^2)^(1/2)

    memory   bytes that the operator must move (weights, activations) / reachable bandwidth; times 1 + RUN / bytes of a
             row that GEMV plans read at once (`run_of`)
    latency  time of a wave alone, waits included, times the rounds in which the workgroups run: workgroups / (compute
             units x workgroups per unit), between that and the next whole number: Little's law
    pipe     clocks that the busiest SIMD (vector ALU, matrix unit, scalar) or compute unit (vector cache, LDS) is
             occupied, for the waves of ceil(workgroups / units) workgroups

The squares model imperfect overlap; of five powers tried, 2 ranks measured GEMV plans best. Occupancy follows from
registers, LDS and waves (`hsaco.occupancy`). A kernel with scratch memory is SCRATCH times slower. Constants and their
sources: `isa_costs.py`. Not in the model: which loads hit a cache (all come from device memory, except scalar ones),
bank conflicts, stalls of dependent instructions, dual issue beyond what the compiler paired, clocks under power limits.

What it is good for: ranking the GEMV, GEMM, norm and RoPE plans of one workload; its seconds are no prediction.
Attention is not modelled: its loop bounds are data. No AMD GPU has been measured. Spearman's rank correlation with
measurements on an NVIDIA H200, where RADV's code for the same SPIR-V (Mesa 22.3, RDNA3) represents NVIDIA's; llama3-8b:

                                                       Q4_0              Q4_K
    GEMV: linear, mean of 4 shapes (21-38 plans)       0.61              0.61
          gate, up and SwiGLU (54 plans)               0.46              0.55
    norms, 512 tokens (3 plans within 2 to 20 %)       0.50              0.50
    default plans of 21 kernels, 2 to 72 us            0.96              0.93

Of the pairs of GEMV plans without spills where it predicts a gain of 25 % or more, 88 % were truly faster (872 of 996);
hence only plans with a predicted gain of 25 % (GEMV) or 40 % (others) are shipped. A GEMM plan (`few_waves`) must also
keep the default plan's occupancy: the model overrates what a single wave per SIMD overlaps.
"""

import gzip
from dataclasses import dataclass
from math import ceil, inf, prod
from pathlib import Path

from mlc_amd.compiler.codegen import hsaco, radv
from mlc_amd.compiler.tuning import isa_costs
from mlc_amd.compiler.tuning.build import target
from mlc_amd.compiler.tuning.database import Measured
from mlc_amd.compiler.tuning.isa_trace import Program, Trace
from mlc_amd.compiler.tuning.local import Local
from mlc_amd.runtime.measure.candidate import Candidate, read
from mlc_amd.schedules.gpu.base.profiles import ADDRESS
from mlc_amd.schedules.gpu.linear import gemv

POWER = 2
SAMPLES = 12  # workgroups that are followed where they do different work: formats of q, k and v, say
LINEAR = ("linear", "gate_up")
MIN_WAVES = 2  # per SIMD, of a GEMM plan other than the default
NO_ASSEMBLY = "the driver shows no assembly; install one that was built with a disassembler"


@dataclass(frozen=True)
class Code:
    """One launch. kernel: registers and memory; assembly: LLVM's syntax, with the label kernel.name."""

    kernel: hsaco.Kernel
    assembly: str
    grid: tuple[int, int, int]
    threads: int


@dataclass(frozen=True)
class Estimate:
    """Seconds of a call; waves: per SIMD, the minimum of the launches."""

    seconds: float
    waves: int
    launches: list[tuple[Code, Trace]]


def run_of(workload, plan, arch) -> float:
    """Contiguous bytes among those that a wave of a GEMV loads at once; of several weights, the first. Infinite for
    other kernels."""
    if workload.args.get("m") != 1 or workload.op not in LINEAR:
        return inf
    weights, k = workload.weights, workload.args["k"]
    fmt, rows = weights[0]
    if workload.op == "linear":
        (used, *_), (split, *_) = gemv.linear_plans(weights, k, arch, plan)
        lanes = split.lanes
    else:
        used = gemv.gate_up_plan([fmt for fmt, _ in weights], rows, k, arch, plan)
        lanes = used.lanes
    row = k * fmt.block_bytes / fmt.block
    once = lanes * used.unroll * row / gemv.units_of([fmt], k)
    return once if once < row else used.rows * row  # rows follow one another


def of_candidate(candidate: Candidate, codes: list[Code], workload: Workload, plan, arch, machine) -> Estimate:
    """How long a candidate's call takes. ValueError for attention, and for a kernel that does not fit the GPU or cannot
    be followed."""
    if "attention" in workload.op:
        raise ValueError("attention is not modelled")
    kinds = len(workload.args.get("segments", [0]))
    launches = [(code, follow(code, machine, kinds)) for code in codes]
    return combine(launches, candidate.facts["bytes"], machine, run_of(workload, plan, arch))


def combine(
    launches: list[tuple[Code, Trace]], bytes_: float, machine: isa_costs.Machine, run: float = inf
) -> Estimate:
    """How long a call takes that launches kernels one after the other and moves so many bytes. run: see `run_of`.
    ValueError for a kernel that does not fit the GPU."""
    waves, seconds = [], 0.0
    memory = bytes_ * (1 + isa_costs.RUN / run) / len(launches) / machine.bandwidth
    for code, trace in launches:
        held, limit = machine.held(code.kernel, code.threads)
        if held == 0:
            raise ValueError(f"a workgroup needs more {limit} than a compute unit has")
        times = _times(code, trace, held, machine) | {"memory": memory}
        slow = isa_costs.SCRATCH if code.kernel.scratch or code.kernel.vgpr_spills else 1.0
        seconds += isa_costs.LAUNCH + slow * sum(time**POWER for time in times.values()) ** (1 / POWER)
        waves.append(held)
    return Estimate(seconds, min(waves), list(launches))


def follow(code: Code, machine, kinds: int = 1) -> Trace:
    """The mean of the launch's waves: one is followed, SAMPLES where there are several kinds of work."""
    program = Program(code.assembly, code.kernel.name, machine, code.kernel.wave, code.grid)
    (x, y, _), total, mean = code.grid, prod(code.grid), Trace()
    count = min(SAMPLES if kinds > 1 else 1, total)
    for i in range(count):
        number = int((i + 0.5) / count * total)
        mean.add(program.run((number % x, number // x % y, number // (x * y))), 1 / count)
    return mean


def _times(code: Code, trace: Trace, held: int, machine) -> dict[str, float]:
    """Seconds by what takes them, memory's bandwidth apart."""
    simds, groups, waves = machine.family.simds, prod(code.grid), -(-code.threads // code.kernel.wave)
    fits = max(1, held * simds // waves)
    rounds = groups / (machine.units * fits)
    rounds = (max(1.0, rounds) + ceil(rounds)) / 2
    busiest = ceil(groups / machine.units) * waves  # of a compute unit
    # workgroups smaller than a unit's SIMDs share them
    simd = busiest / simds if waves >= simds else ceil(groups * waves / (machine.units * simds))
    miss = 1 + (code.kernel.code > isa_costs.CODE_CACHE) * (isa_costs.CODE_MISS - 1)
    clocks = {name: miss * simd * trace.busy[name] for name in ("valu", "matrix", "salu")}
    clocks |= {name: busiest * trace.busy[name] for name in ("memory", "lds")}
    times = {("cache" if name == "memory" else name): n / machine.clock for name, n in clocks.items() if n}
    return times | {"latency": rounds * trace.clocks / machine.clock}


# ---- candidates


def codes_of(candidates: list[Candidate], arch) -> list[list[Code] | str]:
    """The launches of each candidate as the GPU would run them, or why there are none. UserError without the compiler
    that it takes."""
    if arch.api == "rocm" or not candidates:
        return [_of_hsaco(candidate) for candidate in candidates]
    shaders = [_shaders(f"k{i}", candidate) for i, candidate in enumerate(candidates)]
    report = radv.statistics([shader for mine in shaders for shader in mine], arch)
    return [_of_report(report, *pair) for pair in zip(shaders, candidates, strict=True)]


def _shaders(name: str, candidate: Candidate) -> list[radv.Shader]:
    """Of its launches."""
    data, found = candidate.code.read_bytes(), []
    for i, step in enumerate(candidate.steps):
        first, size = step["code"]
        push = ADDRESS if step["table"] else ADDRESS * len(step["args"])
        found.append(radv.Shader(f"{name}_{i}", data[first : first + size], tuple(step["block"]), push))
    return found


def _of_report(report: radv.Report, shaders: list[radv.Shader], candidate: Candidate) -> list[Code] | str:
    found = []
    for shader, step in zip(shaders, candidate.steps, strict=True):
        compiled = report.kernels.get(shader.name)
        if compiled is None or not compiled.assembly:
            return report.refused.get(shader.name, NO_ASSEMBLY)
        found.append(_code(step, compiled.kernel, compiled.assembly))
    return found


def _of_hsaco(candidate: Candidate) -> list[Code]:
    kernels = hsaco.parse(candidate.code.read_bytes()).kernels
    assembly = gzip.decompress(candidate.code.with_suffix(".s.gz").read_bytes()).decode()
    return [_code(step, kernels[step["symbol"]], assembly) for step in candidate.steps]


def _code(step: dict, kernel: hsaco.Kernel, assembly: str) -> Code:
    return Code(kernel, assembly, tuple(step["grid"]), prod(step["block"]))


def few_waves(workload: Workload, found: Estimate, default: Estimate) -> str:
    """Why a GEMM plan must not be preferred to the default: fewer waves per SIMD, or one; "" otherwise."""
    least = max(default.waves, MIN_WAVES)
    if workload.op not in LINEAR or workload.args["m"] == 1 or found.waves >= least:
        return ""
    return f"{found.waves} waves per SIMD; plans other than the default need {least}"


class Static(Local):
    """`Local`, with estimates in place of measurements. UserError for an arch without a model."""

    runner = "static"

    def __init__(self, kind: str, arch: str, **options):
        self.machine = isa_costs.machine(target(kind, arch).archs[0])
        super().__init__(kind, arch, **options)
        self._estimated: dict[Workload, Estimate | str] = {}  # of the default plans

    def serves(self, workload: Workload) -> bool:
        """All but attention's."""
        return "attention" not in workload.op

    def estimates(self, jobs, progress=lambda done, total: None) -> list[Estimate | str]:
        """Of each (workload, plan), or why there is none."""
        built, found = self._build(jobs), []
        candidates = [read(made) for made in built if isinstance(made, Path)]
        codes = iter(zip(candidates, codes_of(candidates, self.arch), strict=True))
        for job, made in zip(jobs, built, strict=True):
            found.append(made if isinstance(made, str) else self._estimate(*next(codes), *job))
            self._drop(made)
            progress(len(found), len(jobs))
        return found

    def _estimate(self, candidate: Candidate, codes: list[Code] | str, workload: Workload, plan) -> Estimate | str:
        if isinstance(codes, str):
            return codes
        try:
            return of_candidate(candidate, codes, workload, plan, self.arch, self.machine)
        except ValueError as e:
            return str(e)

    def measure(self, jobs, progress=lambda done, total: None) -> list[Measured | None]:
        """As `Local.measure`."""
        new = list(dict.fromkeys(workload for workload, _ in jobs if workload not in self._estimated))
        self._estimated |= zip(new, self.estimates([(workload, None) for workload in new]), strict=True)
        found = []
        for (workload, plan), one in zip(jobs, self.estimates(jobs, progress), strict=True):
            default, where = self._estimated[workload], {"device": f"model of {self.arch.name}", "runner": self.runner}
            if isinstance(one, Estimate) and isinstance(default, Estimate) and not self._is_default(workload, plan):
                one = few_waves(workload, one, default) or one
            result = {"error": one} if isinstance(one, str) else {"error": "", "seconds": one.seconds}
            found.append(Measured.of(result, **where))
        return found
