"""The plans of CPU kernels: whichever is taken, the results are the same to the bit, and every space has the default
plan first."""

import os
from dataclasses import asdict, fields, replace

import numpy as np
import pytest
import tvm
import tvm_ffi
from samples import sample
from workloads import operator

from mlc_amd.compiler.codegen.cpu import CpuTarget, build_module
from mlc_amd.runtime.host import cpu_flags
from mlc_amd.runtime.measure.inputs import routing_tables
from mlc_amd.schedules.cpu.base.arch import resolve
from mlc_amd.schedules.space import space
from mlc_amd.tools.reference.mixture import used_slots

os.environ.setdefault("TVM_NUM_THREADS", "2")  # before the first kernel call

# one of each instruction set that this machine runs with plans of its own
ARCHS = list(
    {
        resolve(name).isa: name for name in ("x86-64-v3", "native") if cpu_flags().issuperset(resolve(name).flags)
    }.values()
)


def linear(m, *segments, k=512):
    """A workload; k: the columns."""
    rest = {"biases": [False] * len(segments), "residual": len(segments) == 1}
    return operator("linear", {"segments": [list(s) for s in segments], "k": k, "m": m, "layout": "", **rest})


def gate_up(m, fmt, **attributes):
    args = {"gate": fmt, "up": fmt, "n": 96, "k": 256, "m": m, "layout_in": "", "layout": "tiles"}
    return operator("gate_up", args | attributes)


def attention(m, single, **attributes):
    args = {"heads": 14, "kv_heads": 2, "d": 64, "ctx": 384, "m": m, "single": single, "layout": "tiles"}
    return operator("attention", args | attributes)


def experts(op, m, **args):
    layout, tile = ("", 1) if m == 1 else ("tiles", m)
    common = {"n": 256, "k": 256, "m": m, "experts": 4, "used": 2, "tile": tile, "layout": layout}
    return operator(op, args | common)


GATES = {"gate": "q4_k", "up": "q4_k", "biases": True, "act": "silu", "layout_in": "tiles", "shared": True}
DOWN = {"fmt": "q6_k", "bias": True}

ATTRIBUTES = {"scale": 0.3, "window": 100, "softcap": 20.0, "sinks": True}


WORKLOADS = {
    "linear decode": linear(1, ("q4_0", 160)), "linear float decode": linear(1, ("f16", 64), k=102),
    "linear prefill": linear(128, ("q4_k", 4096), ("q6_k", 2048)), "linear float prefill": linear(32, ("bf16", 2048),
    k=102),
    "gate_up decode": gate_up(1, "q4_k"), "gate_up prefill": gate_up(128, "q4_0"),
    "gate_up gelu": gate_up(128, "f16", act="gelu"),
    "experts' gate_up decode": experts("expert_gate_up", 1, **GATES),
    "experts' gate_up prefill": experts("expert_gate_up", 4, **GATES),
    "experts' linear prefill": experts("expert_linear", 4, **DOWN),
    "experts' down decode": experts("expert_down", 1, weighted=True, residual=False, **DOWN),
    "attention decode": attention(1, 1), "attention rows": attention(4, 4), "attention prefill": attention(64, 0),
    "attention mixed": attention(64, 8),
    "attention decode attributes": attention(1, 1, **ATTRIBUTES),
    "attention prefill attributes": attention(64, 0, **ATTRIBUTES),
}  # fmt: skip


# On an instruction set besides the machine's own: those whose loops differ there. They compile slowly.
OTHERS = (
    "linear decode",
    "linear float prefill",
    "attention decode",
    "attention prefill",
)


def spread(found):
    """The default, and for each field the plans in which it has its smallest and its largest value that the arch can
    run."""
    plans = [found.default]
    for field in fields(found.plan_type):
        others = [replace(found.default, **{field.name: value}) for value in found.choices[field.name]]
        runnable = [plan for plan in others if found.valid(plan) is None]
        plans += [runnable[0], runnable[-1]]
    return list(dict.fromkeys(plans))


def filled(param, workload, rng):
    """An argument of a kernel of m tokens, most of which are live, by its type; scales and caches of moderate size."""
    shape, dtype, m = [int(n) for n in param.shape], str(param.dtype), workload.m
    if param.name == "Groups":
        of = workload.of
        return routing_tables(asdict(of) | {"m": m, "tiles": of.tiles(m)})["Groups"]
    live, single = max(1, m - 4), getattr(workload, "single", 0)
    if param.name == "state":
        return np.array([min(single, live), live, 0, 0], np.int32)
    if param.name == "rows":  # single rows at several depths, then a chunk
        row = np.arange(m)
        place = np.where(row < single, 290 - 40 * row, 290 + row - single)
        return np.stack([place, np.minimum(row, single)], 1).astype(np.int32)
    if param.name == "pages":
        return rng.permuted(np.tile(np.arange(shape[1], dtype=np.int32), (shape[0], 1)), axis=1)
    if dtype.startswith("float"):
        return rng.standard_normal(shape).astype(dtype)
    # bf16 comes as its bits, uint16: small ones, to be finite
    return rng.integers(0, 256 if np.dtype(dtype).itemsize == 1 else 0x4000, shape).astype(np.uint16).astype(dtype)


def defined(workload, names, arrays):
    """The bytes of a kernel's arguments; of what several rows of linear layers write, those of rows that count."""
    found, m = [array.tobytes() for array in arrays], workload.m
    if m == 1 or workload.name not in ("linear", "gate_up", "expert_gate_up", "expert_linear"):
        return found
    named = dict(zip(names, arrays, strict=True))
    rows = used_slots(named, workload, m) if workload.name.startswith("expert") else np.arange(m - 4)
    if "gate_up" in workload.name and workload.layout:
        tile, row = divmod(rows, arrays[-2].shape[2])
        a, s = arrays[-2:]
        found[-2:] = a[tile, :, row].tobytes(), s[tile, :, :, row].tobytes()
    else:
        outputs = len(workload.segments) if workload.name == "linear" else 1
        found[-outputs:] = [array[rows].tobytes() for array in arrays[-outputs:]]
    return found


EACH_RUN = (
    "linear decode", "linear float prefill", "gate_up decode", "experts' linear prefill", "attention decode",
    "attention rows",
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "arch"),
    sample(
        [(name, arch) for arch in ARCHS for name in (WORKLOADS if arch == ARCHS[-1] else OTHERS)],
        [*((name, ARCHS[-1]) for name in EACH_RUN), ("linear decode", ARCHS[0])],
    ),
)
def test_results_do_not_depend_on_the_plan(name, arch):
    workload, target = WORKLOADS[name], CpuTarget(arch)
    found = space(workload, target.arch)
    plans = spread(found)
    assert len(plans) > 2
    kernels = [target.build(workload, target.arch, f"plan_{i}", plan) for i, plan in enumerate(plans)]
    untuned = target.build(workload, target.arch, "plan_0")
    assert tvm_ffi.structural_equal(kernels[0], untuned)
    module = build_module({f.attrs["global_symbol"]: f for f in kernels}, target.arch.target)
    rng = np.random.default_rng(5)
    arrays, names = [filled(param, workload, rng) for param in untuned.params], [param.name for param in untuned.params]
    results = []
    for kernel in kernels:
        arguments = [tvm.runtime.tensor(array) for array in arrays]
        module[kernel.attrs["global_symbol"]](*arguments)
        results.append(defined(workload, names, [argument.numpy() for argument in arguments]))
    assert results[0] != defined(workload, names, arrays)
    for plan, result in zip(plans, results, strict=True):
        assert result == results[0], plan


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_space_begins_with_the_default(name):
    found = space(WORKLOADS[name], resolve("native"))
    assert found.plans[0] == found.default
    assert len({found.kernel(plan).same for plan in found.plans}) == len(found.plans)


def test_a_plan_for_more_tokens_than_a_tile_has_is_refused():
    found = space(WORKLOADS["linear prefill"], resolve("x86-64-v2"))
    assert "tile" in found.valid(replace(found.default, tokens=8))
