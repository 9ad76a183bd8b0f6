"""Decode attention on cooperative matrices whose lanes are known (`attention_rows_matrix.py`) as NVIDIA's GPUs and
AMD's get it, in the SPIR-V emulator, against numpy in float64."""

import itertools
from dataclasses import replace

import attention_cases
import numpy as np
import pytest
from attention_cases import CTX, Case, Rows, check_attention
from samples import sample
from spirv_emulation import emulated, execute
from spirv_kernels import instructions
from tvm.tirx.script import builder as T

from mlc_amd.compiler.codegen.spirv import compile_spirv
from mlc_amd.compiler.codegen.spirv_reader import read
from mlc_amd.schedules.gpu.attention import attention_splits
from mlc_amd.schedules.gpu.attention.attention import attention
from mlc_amd.schedules.gpu.attention.attention_splits import MatrixDecodePlan, default_plan, splits_of, splits_of_rows
from mlc_amd.schedules.gpu.base.device import launch
from mlc_amd.schedules.gpu.base.profiles import resolve
from mlc_amd.schedules.gpu.base.step import kernel
from mlc_amd.schedules.operators.attention import Attention, Rope, RopeAttention

NVIDIA = resolve("nvidia")
STATES = tuple((position, 1) for position in (0, 70, CTX - 1))
CASES = {
    "queries": Case(4, 2, 32, states=STATES),
    # two tiles of rows, of which the second has but one
    "group of 3": Case(3, 1, 32, layout="pairs", rope=Rope(True, 32, 1e-6), states=STATES[1:]),
    "rotated": Case(2, 1, 32, layout="rows", rope=Rope(False, 16), states=STATES, attributes={"sinks": True}),
    "normalized": Case(4, 2, 32, rope=Rope(True, 32, 1e-6, True, True), states=STATES[1:]),
    "codes": Case(2, 1, 32, rope=Rope(True, 32), states=STATES[1:], attributes={"kv": "q8_0"}),
    "codes of 4 bits": Case(2, 1, 32, states=STATES[1:], attributes={"kv": "q4_0"}, back=True),
    "window": Case(
        2, 1, 32, rope=Rope(True, 32), states=STATES,
        attributes={"window": 200, "softcap": 4.0, "sinks": True, "scale": 0.2},
    ),
    "chunk": Case(2, 1, 32, states=STATES, attributes={"chunk": 300}),
    "rows": Case(4, 2, 32, m=8, layout="rows", several=8, states=(Rows((0, CTX - 1, 3, 64)), Rows((70, 500, 450) * 2))),
    "rows of a window": Case(
        2, 1, 32, m=16, several=16, states=(Rows((CTX - 1, 0, 300, 299)),), attributes={"window": 300}
    ),
    # of several sequences, and of one: the first of its rows is after the window of the last
    "rotated rows": Case(
        2, 1, 32, m=8, several=8, rope=Rope(True, 32, 1e-6),
        states=(Rows((0, CTX - 1, 3, 64)), Rows((), (0, 8)), Rows((70, CTX - 1), (253, 5))),
    ),
    "rotated rows of codes": Case(
        2, 1, 32, m=8, several=8, rope=Rope(True, 32), states=(Rows((130,), (63, 4)),), attributes={"kv": "q8_0"}
    ),
    "rotated rows of a window": Case(
        2, 1, 32, m=16, several=16, rope=Rope(False, 32), states=(Rows((5, 70), (125, 12)), Rows((), (0, 16))),
        attributes={"window": 8, "softcap": 4.0, "sinks": True},
    ),
    "64 rows": Case(2, 1, 32, m=64, several=64, rope=Rope(True, 32), states=(Rows(tuple(range(0, 512, 8))),)),
}  # fmt: skip
PLAN = MatrixDecodePlan(64, 2, 32, 8, 8)


ARCHS = ("nvidia", "rdna3", "rdna4")


def check(case, plan=PLAN, arch="nvidia", **how):
    profile = resolve(arch)
    kernel = attention(case.op, profile, "k", plan)
    check_attention(case, lambda arrays: execute(kernel, arrays, profile), **how)


@pytest.fixture(autouse=True)
def many_splits(monkeypatch):
    """Short sequences have several splits, which join."""
    monkeypatch.setattr(attention_splits, "alone_of", lambda arch: 2)


@pytest.mark.parametrize(
    ("name", "arch"),
    sample(
        itertools.product(CASES, ARCHS),
        [("rotated", "nvidia"), ("rotated rows", "rdna3"), ("codes", "rdna4"), ("codes of 4 bits", "rdna3")],
    ),
)
def test_attention(name, arch):
    check(CASES[name], arch=arch)


@pytest.mark.parametrize(
    ("threads", "kv"), sample([(n, kv) for n in (32, 96, 128) for kv in ("f16", "q8_0")], [(96, "q8_0")])
)
def test_rows_without_keys_in_the_cache(threads, kv):
    """First tokens of sequences, alone and several of one: all keys are the rows' own, and most waves have none."""
    states = Rows((0, 0, 1, 40)), Rows((0,), (0, 7)), Rows((0,))
    case = Case(2, 1, 32, m=8, several=8, rope=Rope(True, 32), states=states, attributes={"kv": kv, "sinks": True})
    check(case, replace(PLAN, threads=threads))
    check(case._replace(m=1, states=((0, 1), (1, 1))), replace(PLAN, threads=threads))


@pytest.mark.parametrize(("m", "arch"), sample(itertools.product((1, 8), ARCHS), [(8, "rdna4")]))
def test_scores_that_grow(m, arch):
    """The reference of the weights is renewed again and again, and what came before is rescaled."""
    rows = {"m": 8, "several": 8, "states": (Rows((70, 500, 450)),)} if m > 1 else {"states": STATES[1:]}
    check(CASES["queries"]._replace(**rows), arch=arch, grow=60)


@pytest.mark.full
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("d", "step", "threads"), [(64, 32, 128), (32, 64, 32), (128, 32, 128)])
def test_units_of_columns_and_keys(d, step, threads, arch):
    case = Case(6, 1, d, rope=Rope(True, d), states=((300, 1),))
    check(case, replace(PLAN, step=step, threads=threads), arch)


@pytest.mark.full
@pytest.mark.parametrize("arch", ARCHS[1:])
def test_default_plans(arch):
    """Columns that are not whole units of NVIDIA's, and two parts of a block."""
    case = Case(16, 2, 80, rope=Rope(True, 80), states=((0, 1), (300, 1)))
    assert splits_of(case.layer, resolve(arch)).matrix
    check(case, None, arch)


@pytest.mark.full
def test_long_contexts(monkeypatch):
    """Splits that meet in device memory, of many blocks each."""
    monkeypatch.setattr(attention_cases, "CTX", 20480)
    check(Case(2, 1, 32, rope=Rope(True, 32), states=((1000, 1), (20479, 1))))


# ---- what NVIDIA's GPUs get

LLAMA = Attention(32, 8, 128, 16384)
DONT_UNROLL = 2


@pytest.mark.parametrize("kv", ["f16", "q8_0"])
@pytest.mark.parametrize("m", [1, 64])
def test_kernels_for_nvidia(m, kv):
    arch = NVIDIA
    kernel = attention(RopeAttention(layer=replace(LLAMA, kv=kv), rope=Rope(True, 128), layout="rows", m=m), arch, "k")
    (module,) = compile_spirv({"k": kernel}, arch).modules.values()
    assert read(module.binary).matrix and len(module.binary) < 200_000
    assert module.lds <= arch.lds // 2 and module.block == (128 if m == 1 else 96, 1, 1)
    # over blocks of keys, and over rows that are not in the cache
    hints = [words[2] for name, *words in instructions(module.binary) if name == "LoopMerge"]
    assert hints.count(DONT_UNROLL) >= 2


@pytest.mark.parametrize(
    ("kv_heads", "d", "threads"),
    [(4, 128, (128, 256, 256, 128)), (8, 128, (128, 256, 128, 96)), (8, 64, (128, 256, 256, 128))],
)
def test_workgroups_that_fill_the_gpu(kv_heads, d, threads):
    """Threads of steps of 8 to 64 rows: all of their splits run at the same time."""
    for m, count in zip((8, 16, 32, 64), threads, strict=True):
        splits = splits_of(Attention(32, kv_heads, d, 16384), NVIDIA, m=m)
        assert splits.threads == count and 128 < count * splits.fill * kv_heads / NVIDIA.units <= 320


@pytest.mark.parametrize("lengths", [(513,) * 5, (4096,) * 8, (1024,) * 12, (528,) * 16, (16000, *(40,) * 15)])
def test_no_more_splits_than_run_at_the_same_time(lengths):
    """One row more than fits, or a split of a row that has but one block, would double the time. A long row among short
    ones still has most of the splits."""
    m = 8 if len(lengths) <= 8 else 16
    splits = splits_of(LLAMA, NVIDIA, m=m)
    with kernel("k") as ir:
        rows, found = (T.arg(which, T.buffer((m, 2), "int32")) for which in ("rows", "found"))
        with launch((1,), (NVIDIA.wave,)) as (_, lane):
            divided = splits_of_rows(NVIDIA, LLAMA, splits, rows, m, T.int32(len(lengths)), lane)
            for row, active, before in divided:
                with T.If(row < m), T.Then():
                    T.buffer_store(found, active, [row, 0])
                    T.buffer_store(found, before, [row, 1])
    places = np.array(
        [(n - 1, slot) for slot, n in enumerate(lengths)] + [(1 << 20, 60)] * (m - len(lengths)), np.int32
    )
    _, found = emulated(ir.get(), [places, np.zeros((m, 2), np.int32)], NVIDIA)
    active, before = found.T
    assert not active[len(lengths) :].any() and (active[: len(lengths)] >= 1).all()
    assert (before == np.cumsum(active) - active).all()
    if len(set(lengths)) == 1:
        assert splits.fill // 2 < active.sum() <= splits.fill
    else:
        assert active[0] > splits.fill // 2 and (active[1:] == 1).all()


@pytest.mark.parametrize(
    ("layer", "matrix"),
    [
        (LLAMA, True),
        (Attention(64, 8, 64, 16384), True),
        (Attention(64, 8, 64, 16384, window=128), False),
        (Attention(16, 8, 128, 16384), False),  # two rows would leave most of a matrix empty
        (Attention(32, 8, 80, 16384), False),  # not whole units of columns
        (Attention(16, 1, 576, 16384, values=512), False),
    ],
)
def test_layers_that_take_matrices(layer, matrix):
    assert splits_of(layer, NVIDIA).matrix is matrix
    for arch in ("nvidia:lane_matrix=none", "rdna3:lane_matrix=none", "vangogh"):
        assert not isinstance(default_plan(layer, resolve(arch)), MatrixDecodePlan)


@pytest.mark.parametrize(
    ("group", "d", "archs"),
    [
        (16, 128, {"rdna3", "rdna4"}),
        (8, 64, {"rdna3", "rdna4"}),
        (4, 128, {"rdna4"}),  # products with 4 of 16 rows take RDNA3 longer than others
        (2, 128, set()),
        (8, 72, set()),  # not whole tiles of columns
    ],
)
def test_layers_that_take_matrices_of_amd(group, d, archs):
    layer = Attention(2 * group, 2, d, 16384)
    assert {arch for arch in ("rdna3", "rdna4", "rdna3:wave=64") if splits_of(layer, resolve(arch)).matrix} == archs


@pytest.mark.parametrize(("arch", "plan"), [("vangogh", PLAN), ("nvidia", replace(PLAN, step=16))])
def test_plans_that_do_not_suit(arch, plan):
    with pytest.raises(ValueError, match=r"suit|steps"):
        splits_of(LLAMA, resolve(arch), plan)
