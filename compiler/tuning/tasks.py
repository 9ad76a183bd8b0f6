"""The tuning tasks of a model: its distinct kernels, from the same module that `compile` lowers, and how much each of
them counts.

In: a model and a target. Out: `Task`s. Kernels that several functions or layers call, and kernels of the same shape and
formats, are one task.
"""

from dataclasses import dataclass

from mlc_amd.compiler.lowering import lower
from mlc_amd.compiler.work import work
from mlc_amd.runtime.artifact.manifest import is_encoder
from mlc_amd.schedules.gpu.exchange.joint import planned
from mlc_amd.schedules.operators import Operator

CHUNK = 512  # tokens that a prefill function's calls are counted for
# What a task's weight is for: a prompt of CHUNK, and so many tokens of answers, of one sequence and of as many as each
# step has. Smaller prefill functions serve ends of prompts: one call.
ANSWER = 128


@dataclass(frozen=True, eq=False)
class Task:
    """One kernel to tune.

    name     as in the artifact
    calls    by function: calls per step (decode, step_*), per 512 tokens (prefill_*), or per run (image_*)
    weight   calls for a prompt of 512 tokens and 128 tokens of answers with each function that makes them, and for a
             run of each that encodes images
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

    backend: a Target with one arch. ctx: as for `lower`. UserError as there.
    """
    lowered = lower(model, backend, ctx)
    sizes = {function.name: function.m for function in lowered.functions}
    longest = max((m for name, m in sizes.items() if name.startswith("prefill")), default=1)
    table, exchanging = lowered.plan.calls(), {product for product, _ in lowered.plan.joint}
    tasks: dict[Operator, Task] = {}
    for name, workload in backend.workloads.items():
        calls, weight = dict[str, float](), 0.0
        for function, count in table[name].items():
            if function == "decode" or function.startswith("step_"):
                calls[function], weight = count, weight + count * ANSWER / sizes[function]
            elif function.startswith("prefill"):
                calls[function] = count * CHUNK / sizes[function]
                weight += calls[function] if sizes[function] == longest else count
            elif is_encoder(function):
                calls[function], weight = count, weight + count
        if not calls:  # of a function that only --verify uses
            continue
        about = work(workload, backend.kernels[name])
        if name in exchanging:  # the kernel that also exchanges the product takes the plan of this operator
            workload = planned(workload)
        if old := tasks.get(workload):
            calls = {one: calls.get(one, 0) + old.calls.get(one, 0) for one in calls | old.calls}
            name, weight = old.name, weight + old.weight
        tasks[workload] = Task(workload, name, calls, weight, about["bytes"], about["flops"])
    return sorted(tasks.values(), key=lambda task: -task.weight * task.bytes)
