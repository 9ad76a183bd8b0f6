"""Kernels of layers that keep a state, on the CPU and on Mesa's CPU driver, against float64: all kinds of steps, states
in place and in another cell, sequences that begin."""

import os

import numpy as np
import pytest
import tvm
from samples import sample
from vulkan_harness import PROFILES, gpu, run
from workloads import built, operator

from mlc_amd.compiler.codegen.cpu import build_module
from mlc_amd.schedules.cpu.base.arch import resolve
from mlc_amd.schedules.gpu.base.arch import resolve as gfx
from mlc_amd.schedules.operators.attention import SLOTS, padded_columns
from mlc_amd.schedules.runs import COLUMNS, KEPT
from mlc_amd.tools.reference.case import Case
from mlc_amd.tools.reference.operators import results
from tests.schedules.gpu.test_gpu_experts import emulated

os.environ.setdefault("TVM_NUM_THREADS", "2")  # before the first kernel call
TOLERANCE = 2e-5  # of the largest number
CELLS = SLOTS
# rows of the kernel, of them single ones at most; live rows: slot and position of the first of each run, and its rows,
# which are all single ones but for the last run where the kernel takes a chunk
STEPS = {
    "decode": (1, 1, [(5, 9, 1)]),
    "a sequence begins": (1, 1, [(5, 0, 1)]),
    "rows, the last of one sequence": (8, 8, [(3, 40, 1), (0, 0, 1), (7, 2, 4)]),
    "chunk": (40, 0, [(2, 64, 37)]),
    "a short chunk": (40, 0, [(2, 7, 1)]),
    "mixed": (40, 4, [(9, 3, 1), (1, 0, 2), (4, 0, 35)]),
    "mixed, without a chunk": (40, 24, [(9, 3, 19), (1, 0, 2), (4, 9, 1)]),
    "guesses": (16, 16, [(5, 9, 4), (1, 0, 3), (4, 9, 1), (2, 7, KEPT)]),
}
# Kernels that compile long on Mesa's CPU driver, because of much state or without subgroups, and those that differ from
# another one in sizes: in steps of single rows, of both kinds of rows, and of guesses.
FEW = ("decode", "mixed", "guesses")
ALL_STEPS = ("scan", "conv", "conv of parts", "gated conv", "delta net", "decays of channels")
ALL_STEPS += ("scan of columns", "scan without gates")
ALL_STEPS += ("delta net, decays by channel",)  # other code
DELTA = {"key_heads": 2, "value_heads": 6, "d": 32, "grouped": False, "eps": 1e-6}
SCAN = {"heads": 6, "d": 32, "size": 48, "groups": 2}
KERNELS = {
    "scan": ("ssm_scan", SCAN),
    "scan, large state": ("ssm_scan", SCAN | {"d": 64, "size": 128, "heads": 2, "groups": 1}),
    "scan of columns": ("ssm_scan", {"heads": 1, "d": 96, "size": 16, "groups": 1, "given": True, "by_state": True}),
    "scan without gates": ("ssm_scan", SCAN | {"size": 32, "groups": 6, "given": True, "gated": False}),
    "conv": ("causal_conv", {"channels": 96, "taps": 4, "gated": False, "act": "silu", "bias": True}),
    "conv of parts": (
        "causal_conv",
        {"channels": 240, "taps": 4, "gated": False, "act": "silu", "bias": False, "parts": 3},
    ),
    "gated conv": ("causal_conv", {"channels": 80, "taps": 3, "gated": True, "act": "", "bias": False}),
    "decays of channels": ("channel_decay", {"heads": 3, "d": 48}),
    "delta net": ("delta_net", DELTA),
    "delta net, large heads": ("delta_net", DELTA | {"d": 128, "value_heads": 2, "grouped": True}),
    "delta net, heads of another size": ("delta_net", DELTA | {"d": 48}),
    "delta net, small heads": ("delta_net", DELTA | {"d": 16, "value_heads": 4, "grouped": True}),
    "delta net, decays by channel": ("delta_net", DELTA | {"by_channel": True}),
}


def arrays_of(op, args, m, most, step, guesses=False):
    """Parameters by name; the runs' states are in other cells than their slots, and every second one goes elsewhere.
    Of a step of guesses each row leaves a state, in new cells, but for the last one's of every second run."""
    rng = np.random.default_rng(7)
    rows, live = np.zeros((m, 2), np.int32), 0
    cells = np.repeat(np.arange(SLOTS, dtype=np.int32)[::-1, None], COLUMNS, 1)
    for i, (slot, position, count) in enumerate(step):
        rows[live : live + count] = [(position + j, slot) for j in range(count)]
        live += count
        cells[slot, 1:] = 20 + i if i % 2 == 0 else cells[slot, 0]
        if guesses:
            cells[slot, 1:count] = range(20 + 8 * i, 20 + 8 * i + count - 1)
    single = live if live <= most else live - step[-1][2]
    found = {"state": np.array([single, live, 0, 0], np.int32), "rows": rows, "cells": cells}

    def normal(*shape):
        return rng.standard_normal(shape, np.float32)

    if op == "causal_conv":
        channels, taps = args["channels"], args["taps"]
        own = channels // (parts := args.get("parts", 1))
        for part in [""] if parts == 1 else map(str, range(parts)):
            found |= {"X" + part: normal(m, own * (3 if args["gated"] else 1)), "W" + part: normal(own * taps)}
        found |= {"B": normal(channels)} if args["bias"] else {}
        shape, columns = (taps - 1, channels), channels
    elif op == "channel_decay":
        heads, columns = args["heads"], args["heads"] * args["d"]
        found |= {"X": 9 * normal(m, columns), "A": -np.abs(normal(padded_columns(heads))), "Dt": normal(columns)}
        return found | {"Y": np.full((m, columns), np.nan, np.float32)}
    elif op == "ssm_scan":
        heads, inner, size = args["heads"], args["heads"] * args["d"], args["size"]
        found |= {"X": normal(m, inner + 2 * args["groups"] * size), "Z": normal(m, inner)}
        columns, each = inner, args.get("by_state")
        padded = padded_columns(inner if each else heads)
        found |= {"Dt": 9 * normal(m, padded), "D": normal(padded)}
        found |= {"A": -np.abs(normal(inner * size if each else padded)), "Bias": normal(padded)}
        found["Dt"] = np.abs(found["Dt"]) / 9 if args.get("given") else found["Dt"]
        shape = heads, args["d"] * size
    else:
        d, heads = args["d"], args["value_heads"]
        padded, columns = padded_columns(heads), heads * d
        found |= {"X": normal(m, 2 * args["key_heads"] * d + columns), "Beta": normal(m, padded)}
        if args.get("by_channel"):
            found |= {"Decay": rng.random((m, columns), np.float32)}
        else:
            found |= {"Alpha": 9 * normal(m, padded), "A": -np.abs(normal(padded)), "Dt": normal(padded)}
        shape = heads, d, d
    return found | {"States": normal(CELLS, *shape), "Y": np.full((m, columns), np.nan, np.float32)}


def rows_of(op, m, single):
    """Arguments that say how many rows a kernel has."""
    return {"m": m} if op == "channel_decay" else {"m": m, "single": single}


def check(op, args, layout, arrays, execute):
    case = Case(
        operator(op, args),
        {name: array.copy() for name, array in arrays.items()},
        layout,
        np.arange(arrays["state"][1]),
    )
    expected = results(case)
    execute(arrays)
    for name, wanted in expected.items():
        found = arrays[name] if wanted.rows is None else arrays[name][wanted.rows]
        assert np.abs(found - wanted.value).max() < TOLERANCE * np.abs(wanted.value).max(), name


@pytest.mark.parametrize("kernel", KERNELS)
def test_cpu(kernel):
    op, args = KERNELS[kernel]
    arch, funcs = resolve("native"), {}
    for i, (m, single, _) in enumerate(STEPS.values()):
        funcs[f"kernel{i}"] = built(operator(op, args | rows_of(op, m, single)), arch, f"kernel{i}")
    module = build_module(funcs, arch.target)
    for i, (name, (m, single, step)) in enumerate(STEPS.items()):

        def execute(arrays, i=i):
            names = [param.name for param in funcs[f"kernel{i}"].params]
            tensors = [tvm.runtime.tensor(arrays[name]) for name in names]
            module[f"kernel{i}"](*tensors)
            for name, tensor in zip(names, tensors, strict=True):
                arrays[name][...] = tensor.numpy()

        arrays = arrays_of(op, args, m, single, step, name == "guesses")
        check(op, args | rows_of(op, m, single), "cpu", arrays, execute)


ON_LAVAPIPE = [(kernel, "lavapipe") for kernel in KERNELS]
ON_VULKAN = [*ON_LAVAPIPE, ("delta net", "generic"), ("scan", "generic")]


@pytest.mark.parametrize(
    ("kernel", "profile"), sample(ON_VULKAN, [*((kernel, "lavapipe") for kernel in ALL_STEPS), ("scan", "generic")])
)
def test_vulkan(kernel, profile):
    gpu()
    op, args = KERNELS[kernel]
    for name in STEPS if kernel in ALL_STEPS and profile == "lavapipe" else FEW:
        m, single, step = STEPS[name]
        func = built(operator(op, args | rows_of(op, m, single)), PROFILES[profile])

        def execute(arrays, func=func):
            names = [param.name for param in func.params]
            results = run(func, [arrays[name] for name in names], PROFILES[profile])
            for name, found in zip(names, results, strict=True):
                arrays[name][...] = found

        arrays = arrays_of(op, args, m, single, step, name == "guesses")
        check(op, args | rows_of(op, m, single), "gpu", arrays, execute)


@pytest.mark.full
@pytest.mark.emulator
@pytest.mark.parametrize("kernel", ["delta net", "scan", "scan of columns", "scan without gates"])
@pytest.mark.parametrize("name", ["gfx1100", "gfx1201", "gfx942"])
def test_in_the_emulator(name, kernel):
    op, args = KERNELS[kernel]
    m, single, step = 24, 2, [(9, 3, 2), (4, 0, 19)]
    func = built(operator(op, args | rows_of(op, m, single)), gfx(name))
    arrays = arrays_of(op, args, m, single, step)
    check(op, args | rows_of(op, m, single), "gpu", arrays, lambda arrays: emulated(func, arrays, gfx(name)))
