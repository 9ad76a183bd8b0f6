"""The tuning tasks of a model: its distinct kernels, from the same module that `compile` lowers, and how much each of
them counts.

In: a model and a target. Out: `Task`s. Kernels that several functions or layers call, and kernels of the same shape and
formats, are one task.
"""

from collections import Counter
from dataclasses import dataclass

from mlc_amd.compiler import pipeline
from mlc_amd.compiler.work import work
from mlc_amd.schedules.operators import Operator

CHUNK = 512  # tokens that a prefill function's calls are counted for
# What a task's weight is for: an answer of so many tokens to a prompt of CHUNK. Smaller prefill functions serve ends of
# prompts: one call.
ANSWER = 128


@dataclass(frozen=True, eq=False)
class Task:
    """One kernel to tune.

    name     as in the artifact
    calls    by function: calls per token (decode), or per 512 tokens (prefill_*)
    weight   calls for a prompt of 512 tokens and an answer of 128
    bytes    that a call moves at least; flops: its multiplications and additions
    """

    workload: Operator
    name: str
    calls: dict[str, float]
    weight: float
    bytes: float
    flops: float


def extract(model, backend, ctx: int | None = None) -> list[Task]:
    """The tasks of `model` (a GGUFModel or a synthetic one), those of the heaviest traffic first.

    backend: a Target of `pipeline.make_target` with one arch. ctx: as for `pipeline.compile_model`. UserError as there.
    """
    lowered = pipeline.lower(model, backend, pipeline.capacity(model.config, ctx))
    sizes = {function.name: function.m for function in lowered.functions}
    longest = max((m for name, m in sizes.items() if name.startswith("prefill")), default=1)
    table = {entry["name"]: entry["calls"] for entry in pipeline.kernel_table(lowered.plan)}
    tasks: dict[Operator, Task] = {}
    for name, workload in backend.workloads.items():
        calls, weight = Counter[str](), 0.0
        for function, count in table[name].items():
            if function == "decode":
                calls[function], weight = count, weight + count * ANSWER
            elif function.startswith("prefill"):
                calls[function] = count * CHUNK / sizes[function]
                weight += calls[function] if sizes[function] == longest else count
        if not calls:  # of a function that only --verify uses
            continue
        if old := tasks.get(workload):
            calls, name, weight = calls + Counter(old.calls), old.name, weight + old.weight
        about = work(workload, backend.kernels[name])
        tasks[workload] = Task(workload, name, dict(calls), weight, about["bytes"], about["flops"])
    return sorted(tasks.values(), key=lambda task: -task.weight * task.bytes)
