"""What the cost model sees of a plan: numbers whose logarithms trees can split.

The reference module is the same for every plan, so MetaSchedule's own features, taken from loops, would tell nothing.
One model serves all tasks whose plans are of one type; what it learns of one shape helps with the next, hence the
workload's sizes.
"""

import math

import numpy as np

from mlc_amd.schedules.formats import FORMATS
from mlc_amd.schedules.tuning.spaces import Space
from mlc_amd.schedules.tuning.workload import Workload

SIZES = ("m", "k", "n", "heads", "kv_heads", "d", "ctx")  # of a workload, 0 where it has none


def features(workload: Workload, space: Space, plan, arch) -> np.ndarray:
    """float32 [features]: as many for all workloads whose spaces have the same plan type. ValueError or UserError as
    `Space.kernel`."""
    kernel, values = space.kernel(plan), [getattr(plan, name) for name in space.choices]
    waves = kernel.workgroups * kernel.threads / getattr(arch, "wave", 1)
    units = getattr(arch, "units", 1)
    derived = (
        kernel.workgroups,
        kernel.threads,
        kernel.loads,
        waves,
        kernel.workgroups * kernel.threads * kernel.loads,
    )
    last = kernel.workgroups / units
    idle = 1 - last / math.ceil(last)  # of the compute units, while the last workgroups run
    ratios = [math.log2((1 + a) / (1 + b)) for i, a in enumerate(values) for b in values[:i]]
    return np.array([*map(_log, values), *ratios, *map(_log, derived), idle, *_sizes(workload)], np.float32)


def _log(value: float) -> float:
    return math.log2(1 + value)


def _sizes(workload: Workload) -> list[float]:
    args = workload.args
    segments = args.get("segments", [])
    rows = {"n": sum(n for _, n in segments)} if segments else {}
    sizes = [_log((args | rows).get(name) or 0) for name in SIZES]
    formats = [fmt for fmt, _ in segments] or [args[name] for name in ("gate", "up", "fmt") if name in args]
    bits = [FORMATS[fmt].block_bytes * 8 / FORMATS[fmt].block for fmt in formats]
    return [*sizes, len(formats), max(bits, default=0), min(bits, default=0)]
