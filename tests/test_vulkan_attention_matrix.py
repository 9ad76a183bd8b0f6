"""Decode attention on cooperative matrices (`attention_rows_matrix.py`), on any Vulkan device, against numpy in
float64.

A model stands in for matrices whose distribution over the lanes is NVIDIA's: for subgroups of 8 lanes as Mesa's CPU
driver has them, and for 32 lanes in workgroups of one wave without subgroups. Kernels for the real ones are compiled
and looked at.
"""

from contextlib import contextmanager
from dataclasses import replace

import attention_cases
import pytest
from attention_cases import CTX, Case, Rows, check_attention
from fragment_model import QuadFragments
from samples import sample
from test_vulkan_kernels import execute
from vulkan_harness import gpu

from mlc_amd.compiler.codegen.spirv import compile_spirv
from mlc_amd.compiler.codegen.spirv_reader import read
from mlc_amd.schedules.attention import Attention, Rope
from mlc_amd.schedules.gpu import attention_decode, attention_rows_matrix, attention_splits
from mlc_amd.schedules.gpu.attention_splits import MatrixPlan, default_plan, splits_of
from mlc_amd.schedules.gpu.device import launch
from mlc_amd.schedules.gpu.profiles import resolve

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
PLAN = MatrixPlan(32, 2, 32, 8, 8)
ONE_WAVE = replace(resolve("generic"), family="nvidia", float16=True, units=132, few=(16, 8, 16), lds=48 << 10)


def four_waves():
    """Mesa's CPU driver with matrices of its subgroups."""
    wave = gpu().subgroup[1]
    few = wave // 2, wave // 4, 16
    return replace(resolve("lavapipe"), family="nvidia", units=132, wave=wave, threads=4 * wave, few=few)


@pytest.fixture
def check(monkeypatch):
    """check(case, profile, plan, **how) compares a kernel on the model."""

    def launched(*extents):
        @contextmanager
        def opened():
            with launch(*extents) as axes:
                QuadFragments.lane, QuadFragments.number = axes[-2:]
                QuadFragments.waves = extents[1][1]
                yield axes

        return opened()

    def compare(case, arch, plan, **how):
        kernel = attention_decode.attention_decode(case.layer, case.layout, arch, "k", case.rope, plan, case.m)
        check_attention(case, lambda arrays: execute(kernel, arrays, arch), **how)

    monkeypatch.setitem(attention_splits.ALONE, "nvidia", 2)
    monkeypatch.setattr(attention_decode, "launch", launched)
    monkeypatch.setattr(attention_rows_matrix, "Fragments", QuadFragments)
    return compare


@pytest.mark.parametrize("name", sample(CASES, ["rotated", "rotated rows"]))
def test_attention(name, check):
    check(CASES[name], four_waves(), PLAN)


@pytest.mark.full
def test_scores_that_grow(check):
    """The reference of the weights is renewed again and again."""
    check(CASES["queries"], four_waves(), PLAN, grow=60)


@pytest.mark.full
@pytest.mark.parametrize(("d", "step"), [(64, 32), (32, 64)])
def test_waves_of_32(d, step, check):
    """The matrices of NVIDIA's driver; several units of columns, or of keys."""
    check(Case(6, 1, d, rope=Rope(True, d), states=((300, 1),)), ONE_WAVE, replace(PLAN, step=step))


@pytest.mark.full
def test_long_contexts(check, monkeypatch):
    """Splits that meet in device memory, of many blocks each."""
    monkeypatch.setattr(attention_cases, "CTX", 20480)
    check(Case(2, 1, 32, rope=Rope(True, 32), states=((1000, 1), (20479, 1))), four_waves(), PLAN)


# ---- what NVIDIA's GPUs get

LLAMA = Attention(32, 8, 128, 16384)


@pytest.mark.parametrize("kv", ["f16", "q8_0"])
@pytest.mark.parametrize("m", [1, 64])
def test_kernels_for_nvidia(m, kv):
    arch = resolve("nvidia")
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
    assert splits_of(layer, resolve("nvidia")).matrix is matrix
    for arch in ("nvidia:few=none", "rdna3", "vangogh"):
        assert not isinstance(default_plan(layer, resolve(arch)), MatrixPlan)


@pytest.mark.parametrize(("arch", "plan"), [("rdna4", PLAN), ("nvidia", replace(PLAN, step=16))])
def test_plans_that_do_not_suit(arch, plan):
    with pytest.raises(ValueError, match=r"suit|steps"):
        splits_of(LLAMA, resolve(arch), plan)
