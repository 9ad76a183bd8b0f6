"""The launch plan: flat, complete, and no tensor overwritten while it is needed."""

import math

import numpy as np
import pytest
import tvm_ffi
from tvm import tirx

from mlc_amd.compiler import plan as planning
from mlc_amd.compiler.codegen.cpu import CpuTarget
from mlc_amd.compiler.functions import FunctionSpec
from mlc_amd.compiler.gguf import synthetic
from mlc_amd.compiler.models.build import build_module
from mlc_amd.compiler.passes import fuse
from mlc_amd.compiler.weights import weight_sources


@pytest.fixture(scope="module")
def planned():
    """(plan, backend, model, weights) of functions of one row, and of single rows with a chunk."""
    model, backend = synthetic("tiny-qwen3:q4_k"), CpuTarget("x86-64-v3")
    functions = [FunctionSpec("decode", 1, 1, "all"), FunctionSpec("mixed_64", 64, 8, "answers:8")]
    module, parameters = build_module(model, backend, functions, 64)
    module = backend.select_kernels(fuse(module, backend))
    weights = weight_sources(model, backend, parameters, 64)
    tensors = {source.name: [spec.name for spec in source.planes] for source in weights}
    return planning.make_plan(module, parameters, tensors), backend, model, weights


def arena_range(arg) -> range:
    _, offset, dtype, shape = arg
    return range(offset, offset + math.prod(shape) * np.dtype(dtype).itemsize)


def test_launches(planned):
    plan, backend, model, _ = planned
    assert len(plan.functions["decode"]) == len(plan.functions["mixed_64"]) == 8 * len(model.config.layers) + 4
    for launches in plan.functions.values():
        assert {launch["kernel"] for launch in launches} <= set(backend.kernels)
        assert launches[-2]["args"][-1] == launches[-1]["args"][1] == ["io", "logits"]
        assert launches[-1]["args"][-3:-1] == [["io", "sampled"], ["io", "logprobs"]]
    first = {name: [launch["args"][0] for launch in launches] for name, launches in plan.functions.items()}
    assert all(arg == ["io", "state"] for arg in [*first["decode"], *first["mixed_64"][:-2]])
    assert first["mixed_64"][-2:] == [["io", "answers"]] * 2  # the rows that the last norm kept


def test_rows_and_pages_go_to_the_cache(planned):
    plan, *_ = planned
    for launches in plan.functions.values():
        for launch in launches:
            uses_cache = any(arg[0] == "kv" for arg in launch["args"])
            tables = [["io", "rows"], ["io", "pages.0"]]
            assert launch["args"][1:3] == tables if uses_cache else not any(arg in launch["args"] for arg in tables)


def test_every_weight_is_used_and_none_invented(planned):
    plan, _, _, weights = planned
    used = {
        arg[1]
        for launches in plan.functions.values()
        for launch in launches
        for arg in launch["args"]
        if arg[0] == "weight"
    }
    assert used == {spec.name for source in weights for spec in source.planes}


def test_cache_is_written_and_read_in_place(planned):
    plan, _, model, _ = planned
    for launches in plan.functions.values():
        for layer in range(len(model.config.layers)):
            users = [launch["kernel"] for launch in launches if ["kv", f"k.{layer}"] in launch["args"]]
            assert [name.split("_m")[0].split("_rows")[0] for name in users] == ["rope_kv_write", "attention"]


def test_arena_is_aligned_and_inside(planned):
    plan, *_ = planned
    for launches in plan.functions.values():
        for arg in (arg for launch in launches for arg in launch["args"] if arg[0] == "arena"):
            assert arg[1] % planning.ALIGN == 0
            assert arena_range(arg).stop <= plan.arena_bytes


def written_parameters(kernel) -> set[int]:
    """Positions of the kernel's parameters that it stores to."""
    stored = set()
    tvm_ffi.structural_walk(kernel.body, (tirx.BufferStore, lambda node: stored.add(node.buffer.name)), order="pre")
    return {i for i, param in enumerate(kernel.params) if param.name in stored}


def test_what_is_read_is_what_was_written_last(planned):
    """Replays the plan on byte ownership: what a kernel reads must still be whole, and what it writes may not overlap
    what it reads."""
    plan, backend, *_ = planned
    for launches in plan.functions.values():
        owner = np.full(plan.arena_bytes, -1)
        for step, launch in enumerate(launches):
            outputs = written_parameters(backend.kernels[launch["kernel"]])
            ranges = {i: arena_range(arg) for i, arg in enumerate(launch["args"]) if arg[0] == "arena"}
            assert outputs & ranges.keys() or ["io", "logits"] in launch["args"]
            for i in ranges.keys() - outputs:
                assert len(set(owner[ranges[i].start : ranges[i].stop])) == 1, "overwritten in part"
                assert owner[ranges[i].start] >= 0, "never written"
                for j in ranges.keys() & outputs:
                    assert ranges[i].stop <= ranges[j].start or ranges[j].stop <= ranges[i].start
            for j in ranges.keys() & outputs:
                owner[ranges[j].start : ranges[j].stop] = step * 100 + j
