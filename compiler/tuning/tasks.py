"""The tuning tasks of a model: its distinct kernels, from the same module that `compile` lowers, and the weight of
each.

In: a model and a target. Out: `Task`s. Kernels that several functions or layers call, and kernels of the same shape and
formats, are one task.
"""

from dataclasses import dataclass

from mlc_amd.compiler.lowering import lower
from mlc_amd.compiler.work import work
from mlc_amd.runtime.artifact.manifest import is_encoder
from mlc_amd.schedules.gpu.exchange.joint import planned
from mlc_amd.schedules.operators import Operator

CHUNK = 512  # length of the prompt in a task's weight, tokens
# Tokens of answers in a task's weight, of all sequences together: for one sequence (decode), and for as many sequences
# as each step has rows. Smaller prefill functions compute the ends of prompts, so they count once.
ANSWER = 128


@dataclass(frozen=True, eq=False)
class Task:
    """One kernel to tune.

    name     as in the artifact
    calls    by function: calls per step (decode, step_*), per 512 tokens (prefill_*), or per run (image_*)
    weight   number of calls for a prompt of 512 tokens and an answer of 128 tokens, summed over all functions that can
             compute them, and for one run of each function that encodes images
    bytes    the least that a call moves; flops: its multiplications and additions
    """

    workload: Operator
    name: str
    calls: dict[str, float]
    weight: float
    bytes: float
    flops: float


def extract(model, target, ctx: int | None = None) -> list[Task]:
    """The tasks of `model` (a GGUFModel or a synthetic one), those that move the most bytes first.

    target: a Target with one arch. ctx: see `lower`. Raises UserError as `lower` does.
    """
    lowered = lower(model, target, ctx)
    sizes = {function.name: function.m for function in lowered.functions}
    longest = max((m for name, m in sizes.items() if name.startswith("prefill")), default=1)
    table, exchanging = lowered.plan.calls(), {product for product, _ in lowered.plan.joint}
    tasks: dict[Operator, Task] = {}
    for name, workload in target.workloads.items():
        calls, weight = dict[str, float](), 0.0
        for function, count in table[name].items():
            if function == "decode" or function.startswith("step_"):
                calls[function], weight = count, weight + count * ANSWER / sizes[function]
            elif function.startswith("prefill"):
                calls[function] = count * CHUNK / sizes[function]
                weight += calls[function] if sizes[function] == longest else count
            elif is_encoder(function):
                calls[function], weight = count, weight + count
        if not calls:  # only functions for --verify call it
            continue
        about = work(workload, target.kernels[name])
        if name in exchanging:  # the kernel that also exchanges the product takes the plan of this operator
            workload = planned(workload)
        if old := tasks.get(workload):
            calls = {one: calls.get(one, 0) + old.calls.get(one, 0) for one in calls | old.calls}
            name, weight = old.name, weight + old.weight
        tasks[workload] = Task(workload, name, calls, weight, about["bytes"], about["flops"])
    return sorted(tasks.values(), key=lambda task: -task.weight * task.bytes)
