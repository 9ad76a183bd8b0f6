"""Describes as data what a kernel takes and what it must do: all that is needed to run it alone, without the compiler.

In: a workload (an `Operator`) and its kernel. Out: JSON values, which runtime/measure/candidate.py describes. They are
stored in a candidate's folder and in an artifact's manifest.
"""

from dataclasses import asdict

from mlc_amd.compiler.quant.draws import draws
from mlc_amd.schedules import operators
from mlc_amd.schedules.operators.attention import SLOTS
from mlc_amd.schedules.operators.layouts import output_rows

# Numbers of tokens in the cache with which attention is timed, as far as the capacity allows: True: decode, False:
# prefill. Several, because a plan that is the fastest after 4096 tokens may be slow after many more.
DEPTHS = {True: (512, 4096, 16384), False: (0, 2048, 16384)}


def buffers(func) -> list[tuple[str, tuple[int, ...], str]]:
    """(name, shape, dtype) of a kernel's parameters."""
    return [(param.name, tuple(map(int, param.ty.shape)), str(param.ty.dtype)) for param in func.params]


def work(workload, func) -> dict:
    """The work of a kernel: {"params", "cases", "states", "bytes", "flops"}; the last two are of one call, the mean of
    the cases. func: the kernel's PrimFunc. Raises ValueError if its parameters are not those of the operator."""
    found = operators.parameters(workload, buffers(func))
    cases = _cases(workload, found)
    means = {key: sum(case[key] for case in cases) / len(cases) for key in ("bytes", "flops")}
    params = [_facts(workload, param) for param in found]
    return {"params": params, "cases": cases, "states": _states(workload, cases)} | means


def _facts(workload, param) -> dict:
    """The entry of a parameter in "params"."""
    facts = {"name": param.name, "shape": list(param.shape), "dtype": param.dtype, "role": param.role}
    if param.slot.matrix:
        facts["draw"] = draws(*param.slot.matrix)[param.name.rpartition("_")[2]]
    if param.name == "tokens":
        facts["vocab"] = workload.vocab
    if param.slot.share < 1:
        facts["share"] = param.slot.share
    if param.slot.slots:
        # facts "experts" of schedules/operators/experts.py
        facts["experts"] = asdict(workload.of) | {"m": workload.m, "tiles": workload.of.tiles(workload.m)}
    if param.slot.columns:
        facts["columns"] = param.slot.columns
    return facts


def _single(workload, live: int) -> int:
    """The number of single rows in a step of `live` live rows: as many as the kernel allows. If a chunk may follow,
    single rows are at most half of the rows, and one slot is left for the chunk."""
    m, rows = workload.m, getattr(workload, "rows", "all")
    most = getattr(workload, "single", 0)
    if rows.startswith("answers"):
        most = output_rows(rows, m) - 1
    return live if most == m else min(most, live // 2, SLOTS - 1)


def _cases(workload, params: list[operators.Parameter]) -> list[dict]:
    """The states in which a kernel is timed, with its bytes and operations in each."""
    m, ctx = workload.m, workload.positions
    single = _single(workload, m)
    positions = [0]
    if workload.reads_cache:
        room = ctx - 1 if m == single else ctx - m
        positions = list(dict.fromkeys(min(depth, room) for depth in DEPTHS[m == single]))
    elif ctx > 1:
        positions = [min(DEPTHS[True][0], ctx - m)]
    costs = operators.costs(workload, params)
    return [
        {
            "name": f"d{position}",
            "state": [position, m, single, 0],
            "bytes": costs.bytes(m, position, single),
            "flops": costs.operations(m, position, single),
        }
        for position in positions
    ]


def _states(workload, cases: list[dict]) -> list[list[int]]:
    """The states in which a kernel is verified: its cases, and states with fewer live tokens than the step has rows."""
    m, cached = workload.m, workload.positions > 1
    ctx = workload.positions if cached else 1 << 30
    few = max(1, m - 3)
    more = [[min(37, ctx - m), few, _single(workload, few), 0]]
    if cached:
        more.append([0, 1, _single(workload, 1), 0])
    return [list(state) for state in dict.fromkeys(map(tuple, [*(case["state"] for case in cases), *more]))]
