"""Sparse attention by an indexer on the CPU, on Mesa's CPU driver and in the emulator, against float64: rows that see
fewer keys than they may and more, equal scores, pages in any order."""

from dataclasses import replace

import numpy as np
import pytest
import tvm
from spirv_emulation import execute
from vulkan_harness import PROFILES, gpu, run
from workloads import built

from mlc_amd.compiler.codegen.cpu import build_module
from mlc_amd.compiler.codegen.spirv import compile_spirv
from mlc_amd.compiler.codegen.spirv.opcodes import WORKGROUP
from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.cpu.attention.cache import cache_types as cpu_types
from mlc_amd.schedules.cpu.base.arch import resolve
from mlc_amd.schedules.gpu.attention.cache import cache_types as gpu_types
from mlc_amd.schedules.gpu.base import profiles
from mlc_amd.schedules.gpu.base.arch import resolve as gfx
from mlc_amd.schedules.gpu.latent import choice, scores, selected_tiles
from mlc_amd.schedules.operators import CompressedAttention, SelectedAttention, SelectKeys
from mlc_amd.schedules.operators.attention import PAGE, SLOTS, Attention
from mlc_amd.tools.reference.case import Case
from mlc_amd.tools.reference.operators import results
from tests.dev.spirv.program import parse
from tests.schedules.gpu.test_gpu_experts import emulated

CTX, USED, M = 256, 40, 6
PLACES = [(39, 2), (40, 2), (0, 5), (150, 7), (151, 7), (255, 9)]  # position and slot of each row
LAYER = Attention(heads=3, kv_heads=1, d=80, ctx=CTX, scale=0.2, values=64)
WIDE = Attention(heads=6, kv_heads=2, d=72, ctx=CTX, scale=0.2)
SHARED = Attention(heads=4, kv_heads=1, d=48, ctx=CTX, window=24, sinks=True, values=48)
KERNELS = {
    "choice": SelectKeys(heads=3, d=48, used=USED, ctx=CTX, m=M),
    "blocks": SelectKeys(heads=3, d=48, used=USED // 4, ctx=CTX, m=M, block=4),
    "blocks by head": SelectKeys(heads=2, d=48, used=3, ctx=CTX, m=M, block=16, by_head=True, local=2),
    "attention": SelectedAttention(layer=LAYER, used=USED, m=M),
    "attention in splits": SelectedAttention(layer=replace(LAYER, heads=4, sinks=True), used=128, m=M),
    "attention with sinks": SelectedAttention(layer=replace(LAYER, sinks=True), used=USED, m=M),
    "attention to blocks": SelectedAttention(layer=WIDE, used=USED // 4, m=M, block=4, tail=True),
    "attention to blocks by head": SelectedAttention(layer=WIDE, used=3, m=M, block=16, sets=2),
    "compressed": CompressedAttention(layer=SHARED, ratio=4, used=0, m=M),
    "compressed and chosen": CompressedAttention(layer=SHARED, ratio=4, used=12, m=M),
    "compressed to long blocks": CompressedAttention(layer=SHARED, ratio=128, used=0, m=M),
    "a window of shared keys": CompressedAttention(layer=SHARED, ratio=0, used=0, m=M),
}


def arrays_of(op, layout, places):
    """Parameters by name; of a third of the keys the scores are equal."""
    rng, rows = np.random.default_rng(3), np.array(places, np.int32)
    pages = np.stack([rng.permutation(op.positions // PAGE) for _ in range(SLOTS)]).astype(np.int32)
    found = {"state": np.array([op.m, op.m, 0, 0], np.int32), "rows": rows, "pages": pages}
    if isinstance(op, SelectKeys):
        inputs = {name: rng.standard_normal(shape, np.float32) for name, shape in op.shapes().items() if shape}
        cache = rng.standard_normal(op.cache_shape()).astype(np.float16)
        cache[:, ::3] = cache[0, 0]
        return found | inputs | {"Ik": cache, "Ids": np.full((op.m, op.sets * op.used), -2, np.int32)}
    if isinstance(op, CompressedAttention):
        inputs = {name: rng.standard_normal(shape, np.float32) for name, shape in op.inputs.items() if shape}
        names = zip(("Kc", "Cc"), op.caches.values(), strict=False)
        caches = {name: rng.standard_normal(shape).astype(np.float16) for name, shape in names}
        ids = np.sort(np.stack([rng.permutation(CTX)[: op.used] for _ in range(M)]), 1).astype(np.int32)
        ids[:, -2:] = -1  # beside positions within blocks, and after the row
        sinks, y = rng.standard_normal(SHARED.heads).astype(np.float32), np.zeros((M, SHARED.heads * SHARED.d), "f4")
        return found | inputs | caches | {"Ids": ids, "Sinks": sinks, "Y": y}
    layer = op.layer
    types = (cpu_types if layout == "cpu" else gpu_types)(layer)
    dtype = np.float32 if layout == "cpu" else np.float16
    ids = np.full((M, op.sets, op.used), -1, np.int32)
    for row, (position, _) in enumerate(PLACES):
        own = position // op.block
        count = min(own + 1, op.used - (op.tail and (position + 1) % op.block == 0))
        for of_set in ids[row]:
            of_set[:count] = np.sort(rng.permutation(own + 1)[:count])
            of_set[count - 1] = max(of_set[count - 1], own)
    caches = {f"{which.upper()}c": rng.standard_normal(of[0]).astype(np.float16) for which, of in types.items()}
    return found | caches | {
        "Qo": rng.standard_normal((M, layer.heads, layer.width)).astype(dtype), "Ids": ids.reshape(M, -1),
        "Sinks": rng.standard_normal(layer.heads).astype(np.float32),
        "Y": np.zeros((M, layer.heads * layer.value_d), np.float32),
    }  # fmt: skip


def check(op, layout, execute, limit=1e-5, places=PLACES):
    arrays = arrays_of(op, layout, places)
    case = Case(op, {name: array.copy() for name, array in arrays.items()}, layout, np.arange(op.m))
    expected = results(case)
    execute(arrays)
    for name, wanted in expected.items():
        found = arrays[name] if wanted.rows is None else arrays[name][wanted.rows]
        assert np.abs(found - wanted.value).max() <= limit * np.abs(wanted.value).max(), name


@pytest.mark.parametrize("kernel", KERNELS)
def test_cpu(kernel):
    op, arch = KERNELS[kernel], resolve("native")
    func = built(op, arch, "kernel")
    module = build_module({"kernel": func}, arch.target)

    def execute(arrays):
        tensors = {param.name: tvm.runtime.tensor(arrays[param.name]) for param in func.params}
        module["kernel"](*tensors.values())
        for name, tensor in tensors.items():
            arrays[name][...] = tensor.numpy()

    check(op, "cpu", execute)


def on_lavapipe(op, **changes):
    gpu()
    func = built(op, replace(PROFILES["lavapipe"], **changes))

    def execute(arrays):
        names = [param.name for param in func.params]
        for name, found in zip(names, run(func, [arrays[name] for name in names], PROFILES["lavapipe"]), strict=True):
            arrays[name][...] = found

    return execute


@pytest.mark.parametrize("kernel", KERNELS)
def test_vulkan(kernel):
    check(KERNELS[kernel], "gpu", on_lavapipe(KERNELS[kernel]))


def test_choice_of_many_keys():
    """More scores than the two workgroups of a row look at together, and rows enough for workgroups with several
    groups."""
    places = [(9215 - 400 * row, row) for row in range(12)]
    op = SelectKeys(heads=8, d=32, used=500, ctx=9216, m=len(places))
    check(op, "gpu", on_lavapipe(op, units=2 * len(places), threads=128), places=places)


CHOICE = SelectKeys(heads=32, d=64, used=USED, ctx=CTX, m=M)


@pytest.mark.parametrize("arch", ["nvidia", "rdna3"])
def test_choice_on_matrices(arch):
    """Where a lane's sums are not known, and where they are."""
    device = profiles.resolve(arch)
    check(CHOICE, "gpu", lambda arrays: execute(built(CHOICE, device), arrays, device))


def test_parts_of_a_row():
    """Rows with scores in both parts, in one of them and in none."""
    device, places = profiles.resolve("nvidia"), [(4095, 2), (100, 7), (30, 1)]
    op = SelectKeys(heads=16, d=64, used=USED, ctx=4096, m=len(places))
    check(op, "gpu", lambda arrays: execute(built(op, device), arrays, device), places=places)


@pytest.mark.parametrize("ctx", [CTX, 8192])
def test_barriers_of_the_choice_are_in_no_loop(ctx):
    """NVIDIA's driver 580 made wrong code of some modules with barriers in a loop of 0 or 1 steps."""
    device = profiles.resolve("nvidia")
    op = SelectKeys(heads=16, d=64, used=USED, ctx=ctx, m=1)
    module = compile_spirv({"kernel": built(op, device, "kernel")}, device)
    for launch in module.functions["kernel"].launches[2:]:
        ends, barriers, program = [], 0, parse(module.modules[launch.symbol].binary)
        for label, block in program.blocks.items():
            ends = [end for end in ends if end != label]
            ends += [block.merge.args[0]] if block.merge is not None and block.merge.name == "LoopMerge" else []
            scopes = [one.args[0] for one in block.body if one.name == "ControlBarrier"]
            met = sum(int(program.constants[scope]) == WORKGROUP for scope in scopes)
            assert not (met and ends)
            barriers += met
        assert barriers


def test_several_groups_of_keys_on_matrices(monkeypatch):
    """One workgroup has all groups of a row."""
    monkeypatch.setattr(scores, "FILL", 1)
    device, places = replace(profiles.resolve("nvidia"), units=1), [(511, 2), (300, 7)]
    op = SelectKeys(heads=16, d=64, used=USED, ctx=512, m=len(places))
    check(op, "gpu", lambda arrays: execute(built(op, device), arrays, device), places=places)


def test_queries_that_float16_cannot_hold():
    """Those of even heads are tiny, those of odd heads large; the scores of two kinds of keys differ by 2**-13."""
    arch, factors = profiles.resolve("nvidia"), np.where(np.arange(32) % 2, 1e30, 1e-30)

    def changed(arrays):
        queries = np.zeros((M, 32, 64))
        queries[:, :, :2] = 1 + 2.0**-13, 1
        arrays["Q"][:] = (queries * factors[:, None]).reshape(M, -1)
        arrays["W"][:] = 1 / factors
        arrays["Ik"][:], arrays["K"][:] = 0, 0
        arrays["Ik"][:, ::2, 1] = arrays["Ik"][:, 1::2, 0] = 1
        return arrays

    arrays = changed(arrays_of(CHOICE, "gpu", PLACES))
    case = Case(CHOICE, {name: array.copy() for name, array in arrays.items()}, "gpu", np.arange(M))
    execute(built(CHOICE, arch), arrays, arch)
    np.testing.assert_array_equal(arrays["Ids"], results(case)["Ids"].value)


@pytest.mark.full
@pytest.mark.emulator
@pytest.mark.parametrize("kernel", [*KERNELS, "choice on matrices"])
@pytest.mark.parametrize("name", ["gfx1100", "gfx942"])
def test_in_the_emulator(name, kernel):
    op = KERNELS.get(kernel, CHOICE)
    check(op, "gpu", lambda arrays: emulated(built(op, gfx(name)), arrays, gfx(name)))


@pytest.mark.full
@pytest.mark.emulator
@pytest.mark.parametrize("name", ["gfx1100", "gfx1201", "gfx942"])
def test_parts_of_a_row_in_the_emulator(name, monkeypatch):
    arch, op = gfx(name), replace(KERNELS["choice"], ctx=8 * gfx(name).wave)
    monkeypatch.setattr(choice, "MOST_THREADS", arch.wave)  # so there are two parts
    check(op, "gpu", lambda arrays: emulated(built(op, arch), arrays, arch))


MATRIX = SelectedAttention(layer=replace(LAYER, heads=20, d=96, sinks=True), used=128, m=M)


@pytest.mark.parametrize("units", [1, 132])
def test_on_matrices(units):
    """With one split of a row and with several; weights are float16."""
    arch = replace(profiles.resolve("nvidia"), units=units)
    plan = selected_tiles.plan_for(MATRIX, arch)
    assert plan and (selected_tiles.splits_of(MATRIX, plan, arch) > 1) == (units > 1)
    check(MATRIX, "gpu", lambda arrays: execute(built(MATRIX, arch), arrays, arch), 1e-3)


def test_more_keys_than_shared_memory_holds():
    layer = replace(SHARED, ctx=1 << 20)
    for op in (
        CompressedAttention(layer=layer, ratio=128, used=0, m=1),
        SelectedAttention(layer=replace(LAYER, ctx=1 << 20), used=1 << 14, m=64),
    ):
        with pytest.raises(UserError, match="does not fit the shared memory of generic; compile with a smaller --ctx"):
            built(op, profiles.resolve("generic"))
