"""Decode attention on cooperative matrices (`attention_rows_matrix.py`) as NVIDIA's GPUs get it, in the SPIR-V
emulator, against numpy in float64."""

from dataclasses import replace

import attention_cases
import pytest
from attention_cases import CTX, Case, Rows, check_attention
from samples import sample
from spirv_emulation import execute

from mlc_amd.compiler.codegen.spirv import compile_spirv
from mlc_amd.compiler.codegen.spirv_reader import read
from mlc_amd.schedules.attention import Attention, Rope
from mlc_amd.schedules.gpu import attention_decode, attention_splits
from mlc_amd.schedules.gpu.attention_splits import MatrixPlan, default_plan, splits_of
from mlc_amd.schedules.gpu.profiles import resolve

NVIDIA = resolve("nvidia")
STATES = tuple((position, 1) for position in (0, 70, CTX - 1))
CASES = {
    "queries": Case(4, 2, 32, states=STATES),
    # two tiles of rows, of which the second has but one
    "group of 3": Case(3, 1, 32, layout="half", rope=Rope(True, 32, 1e-6), states=STATES[1:]),
    "rotated": Case(2, 1, 32, layout="rows", rope=Rope(False, 16), states=STATES, attributes={"sinks": True}),
    "normalized": Case(4, 2, 32, rope=Rope(True, 32, 1e-6, True, True), states=STATES[1:]),
    "codes": Case(2, 1, 32, rope=Rope(True, 32), states=STATES[1:], attributes={"kv": "q8_0"}),
    "window": Case(
        2, 1, 32, rope=Rope(True, 32), states=STATES,
        attributes={"window": 200, "softcap": 4.0, "sinks": True, "scale": 0.2},
    ),
    "chunk": Case(2, 1, 32, states=STATES, attributes={"chunk": 300}),
    "rows": Case(4, 2, 32, m=8, layout="rows", several=8, states=(Rows((0, CTX - 1, 3, 64)), Rows((70, 500, 450) * 2))),
    "rows of a window": Case(
        2, 1, 32, m=16, several=16, states=(Rows((CTX - 1, 0, 300, 299)),), attributes={"window": 300}
    ),
    # of several sequences, and of one: the first of its rows is behind the window of the last
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
PLAN = MatrixPlan(64, 2, 32, 8, 8)


def check(case, plan=PLAN, **how):
    kernel = attention_decode.attention_decode(case.layer, case.layout, NVIDIA, "k", case.rope, plan, case.m)
    check_attention(case, lambda arrays: execute(kernel, arrays, NVIDIA), **how)


@pytest.fixture(autouse=True)
def many_splits(monkeypatch):
    """Short sequences have several splits, which join."""
    monkeypatch.setitem(attention_splits.ALONE, "nvidia", 2)


@pytest.mark.parametrize("name", sample(CASES, ["rotated", "rotated rows"]))
def test_attention(name):
    check(CASES[name])


@pytest.mark.parametrize("m", [1, 8])
def test_scores_that_grow(m):
    """The reference of the weights is renewed again and again, and what came before is rescaled."""
    rows = {"m": 8, "several": 8, "states": (Rows((70, 500, 450)),)} if m > 1 else {"states": STATES[1:]}
    check(CASES["queries"]._replace(**rows), grow=60)


@pytest.mark.full
@pytest.mark.parametrize(("d", "step", "threads"), [(64, 32, 128), (32, 64, 32), (128, 32, 128)])
def test_units_of_columns_and_keys(d, step, threads):
    case = Case(6, 1, d, rope=Rope(True, d), states=((300, 1),))
    check(case, replace(PLAN, step=step, threads=threads))


@pytest.mark.full
def test_long_contexts(monkeypatch):
    """Splits that meet in device memory, of many blocks each."""
    monkeypatch.setattr(attention_cases, "CTX", 20480)
    check(Case(2, 1, 32, rope=Rope(True, 32), states=((1000, 1), (20479, 1))))


# ---- what NVIDIA's GPUs get

LLAMA = Attention(32, 8, 128, 16384)


@pytest.mark.parametrize("kv", ["f16", "q8_0"])
@pytest.mark.parametrize("m", [1, 64])
def test_kernels_for_nvidia(m, kv):
    arch = NVIDIA
    kernel = attention_decode.attention_decode(replace(LLAMA, kv=kv), "rows", arch, "k", Rope(True, 128), m=m)
    (module,) = compile_spirv({"k": kernel}, arch).modules.values()
    assert read(module.binary).matrix and len(module.binary) < 200_000
    assert module.lds <= arch.lds // 2 and module.block == (128, 1, 1)


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
    for arch in ("nvidia:few=none", "rdna3", "vangogh"):
        assert not isinstance(default_plan(layer, resolve(arch)), MatrixPlan)


@pytest.mark.parametrize(("arch", "plan"), [("rdna4", PLAN), ("nvidia", replace(PLAN, step=16))])
def test_plans_that_do_not_suit(arch, plan):
    with pytest.raises(ValueError, match=r"suit|steps"):
        splits_of(LLAMA, resolve(arch), plan)
