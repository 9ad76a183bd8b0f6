"""RoPE with cache writes, and attention, on emulated AMD GPUs against numpy in float64.

Every case is a chunk in the middle of a sequence. The caches hold stale finite numbers behind it, which must neither
matter nor change. Registers, LDS and scratch buffers start as garbage, waves run in shuffled order, and `emulate` fails
where LDS is not waited for.
"""

import functools
import re
from typing import NamedTuple

import numpy as np
import pytest
from test_cpu_attention import LOG2E, attention_reference, rope_reference

from mlc_amd.compiler.codegen.rocm import compile_hsaco
from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.gpu.arch import resolve
from mlc_amd.schedules.gpu.attention import attention
from mlc_amd.schedules.gpu.attention_decode import attention_decode, scratch_shapes
from mlc_amd.schedules.gpu.attention_prefill_dot import attention_prefill_dot
from mlc_amd.schedules.gpu.rope_kv_write import Rope, cache_shapes, rope_kv_write
from mlc_amd.tools.dev.gfxemu import emulate

ARCHS = ("gfx1100", "gfx1201", "gfx942")
CTX = 512
STALE_K, STALE_V, LEFT = 300.0, 30000.0, 7.0
WAVE_ORDER = 3  # a seed: shuffled


class Case(NamedTuple):
    heads: int
    kv_heads: int
    d: int
    m: int = 1
    act: str = ""
    rope: Rope | None = None
    states: tuple = tuple((length - 1, 1) for length in (1, 7, 33, 64, 65, 300))


DECODE = {
    "decode_group_4": Case(8, 2, 64),
    "decode_group_1": Case(2, 2, 96, act="half", rope=Rope(True, 48)),
    "decode_group_2": Case(2, 1, 128, act="rows", rope=Rope(True, 128, 1e-6)),
    "decode_group_7": Case(7, 1, 64, act="rows", rope=Rope(False, 64)),
}
PREFILL = {
    "prefill_group_1": Case(2, 2, 96, 16, "half", states=((0, 16), (57, 13), (64, 1), (CTX - 16, 16))),
    "prefill_group_4": Case(4, 1, 128, 64, "half", states=((0, 64), (57, 50))),
    "prefill_group_7": Case(7, 1, 64, 16, "", states=((33, 16), (300, 3))),
}
DOT = {"prefill_dot": Case(3, 1, 64, 16, "rows", states=((0, 16), (57, 13)))}
ROPE = {
    "rope_neox_partial": Case(3, 1, 96, 16, rope=Rope(True, 48)),
    "rope_interleaved": Case(2, 1, 64, 1, rope=Rope(False, 64)),
    "rope_norm": Case(4, 2, 128, 16, rope=Rope(True, 128, 1e-6)),
}
CASES = DECODE | PREFILL | DOT | ROPE
# What takes most registers, on GPUs that differ in how many there are: of gfx906's wide waves each has the fewest.
# (Prefill with wider heads is in test_tuning_attention.py.)
REGISTERS = {
    "gfx1100": DECODE | PREFILL | ROPE, "gfx1201": ("prefill_group_4", "rope_norm"), "gfx942": ("prefill_group_4",
    "rope_norm"),
    "gfx906": ("decode_group_7",), "gfx1010": ("decode_group_7", "rope_norm"), "gfx1030": ("decode_group_7",),
}  # fmt: skip


def build(arch, name):
    case = CASES[name]
    heads, kv_heads, d, m, act, rope, _ = case
    if name in ROPE:
        return rope_kv_write(heads, kv_heads, d, CTX, m, *rope, arch, name)
    if name in DOT:
        return attention_prefill_dot(heads, kv_heads, d, CTX, m, act, arch, name)
    if rope:
        return attention_decode(heads, kv_heads, d, CTX, act, arch, name, rope)
    return attention(heads, kv_heads, d, CTX, m, act, arch, name)


@functools.cache
def compiled(arch_name, name):
    arch = resolve(arch_name)
    return compile_hsaco({name: build(arch, name)}, arch)


def pack(k, v):
    """Keys and values [kv_heads, ctx, d] in the caches' layouts."""
    n, ctx, d = k.shape
    return (
        np.ascontiguousarray(k.reshape(n, ctx // 32, 32, d // 8, 8).transpose(0, 1, 3, 2, 4)),
        np.ascontiguousarray(v.reshape(n, ctx // 8, 8, d).transpose(0, 1, 3, 2)),
    )


def unpack(Kc, Vc):
    n, _, d, _ = Vc.shape
    return Kc.transpose(0, 1, 3, 2, 4).reshape(n, -1, d), Vc.transpose(0, 1, 3, 2).reshape(n, -1, d)


def outputs(m, columns):
    """All layouts, filled with something that must stay where nothing is written."""
    return {
        "X": np.full((m, columns), LEFT, np.float32),
        "H": np.full((m, columns), LEFT, np.float16),
        "A": np.zeros((m, columns // 32, 32), np.int8),
        "S": np.full((m, columns // 32, 4), LEFT, np.float32),
    }


def check_output(out, act, live, expected):
    scale = np.abs(expected).max()
    if act == "rows":
        q, d = out["A"][:live].astype(np.int64), out["S"][:live, :, 0].astype(np.float64)
        got = (q * d[:, :, None]).reshape(live, -1)
        sums = np.stack([q.sum(-1), q[..., :16].sum(-1), q[..., 16:].sum(-1)], -1) * d[:, :, None]
        np.testing.assert_allclose(out["S"][:live, :, 1:], sums, rtol=1e-5, atol=1e-6 * scale)
        assert (np.abs(got - expected) <= np.repeat(d, 32, 1) * 0.501 + scale * 2e-3).all()
        assert d.max() < scale / 100
        assert (out["S"][live:] == LEFT).all()
    else:
        got = out["H" if act == "half" else "X"]
        assert np.abs(got[:live] - expected).max() <= scale * 2e-3
        assert (got[live:] == LEFT).all()


def rope_inputs(rng, case):
    """(inputs of the kernel, function position, live -> rotated queries and keys, in float64)"""
    heads, kv_heads, d, m, _, (neox, rotary, eps), _ = case
    angles = np.arange(CTX)[:, None] * 10000.0 ** (-np.arange(rotary // 2) / (rotary // 2))
    cs = np.stack([np.cos(angles), np.sin(angles)], -1).reshape(CTX, rotary).astype(np.float32)
    q, k, v = (rng.standard_normal((m, h * d)).astype(np.float32) for h in (heads, kv_heads, kv_heads))
    norms = {} if eps is None else {name: rng.standard_normal(d).astype(np.float32) for name in ("QN", "KN")}

    def rotated(position, live):
        rows = cs[position : position + live]
        return (
            rope_reference(q.reshape(m, heads, d)[:live], rows, neox, rotary, eps, norms.get("QN")),
            rope_reference(k.reshape(m, kv_heads, d)[:live], rows, neox, rotary, eps, norms.get("KN")),
        )

    return {"Q": q, "K": k, "V": v, "CS": cs, **norms}, rotated


def stale_caches(rng, kv_heads, d, valid):
    """Keys and values [kv_heads, CTX, d], random up to `valid`."""
    k, v = (rng.standard_normal((kv_heads, CTX, d)).astype(np.float16) for _ in "kv")
    k[:, valid:], v[:, valid:] = STALE_K, STALE_V
    return k, v


def check_written(before, after, position, expected):
    """before, after, as [kv_heads, CTX, d]; expected [tokens, kv_heads, d] from `position` on; the rest is
    unchanged."""
    here = slice(position, position + len(expected))
    np.testing.assert_allclose(after[:, here].transpose(1, 0, 2), expected, rtol=1e-3, atol=2e-6)
    gone = np.arange(position, position + len(expected))
    assert (np.delete(after, gone, axis=1) == np.delete(before, gone, axis=1)).all()


@pytest.mark.emulator_full
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", [*DECODE, *PREFILL, *DOT])
def test_attention(arch, name):
    case = CASES[name]
    heads, kv_heads, d, m, act, rope, states = case
    rng = np.random.default_rng(1)
    scratch = {
        n: np.full(shape, np.nan, dtype) if dtype == "float32" else np.zeros(shape, dtype)
        for n, (shape, dtype) in scratch_shapes(heads, kv_heads, d).items()
    }
    for position, live in states:
        end = position + live
        k, v = stale_caches(rng, kv_heads, d, position if rope else end)
        Kc, Vc = pack(k, v)
        if rope:
            inputs, rotated = rope_inputs(rng, case)
            queries, own = rotated(position, 1)
        else:
            q = rng.standard_normal((m, heads, d)).astype(np.float32) * 2 * LOG2E / np.sqrt(d)
            q[live:] = np.nan
            inputs = {"Qo": q.astype(np.float16)}
            queries = inputs["Qo"][:live].astype(np.float64) / LOG2E * np.sqrt(d)
        out = outputs(m, heads * d)
        state = np.array([position, live, 0, 0], np.int32)
        emulate(
            compiled(arch, name), name, {"state": state, "Kc": Kc, "Vc": Vc, **inputs, **scratch, **out}, WAVE_ORDER
        )
        new_k, new_v = unpack(Kc, Vc)
        if rope:
            check_written(k, new_k, position, own)
            check_written(v, new_v, position, inputs["V"].reshape(1, kv_heads, d))
        else:
            assert (new_k == k).all() and (new_v == v).all()
        keys, values = (x[:, :end].astype(np.float64) for x in (new_k, new_v))
        check_output(out, act, live, attention_reference(queries, keys, values, position))
        assert not scratch["Arrived"].any()


@pytest.mark.emulator_full
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", ROPE)
def test_rope_kv_write(arch, name):
    case = CASES[name]
    heads, kv_heads, d, m, _, _, _ = case
    rng = np.random.default_rng(2)
    for position, live in {
        (0, m),
        (5, max(1, m - 3)),
        (CTX - 1, m),
    }:  # the last one has no room for more than one token
        written = min(live, CTX - position)
        k, v = stale_caches(rng, kv_heads, d, 0)
        Kc, Vc = pack(k, v)
        inputs, rotated = rope_inputs(rng, case)
        Qo = np.full((m, heads, d), LEFT, np.float16)
        state = np.array([position, live, 0, 0], np.int32)
        emulate(compiled(arch, name), name, {"state": state, "Kc": Kc, "Vc": Vc, "Qo": Qo, **inputs}, WAVE_ORDER)
        queries, keys = rotated(position, written)
        np.testing.assert_allclose(Qo[:written], queries * LOG2E / np.sqrt(d), rtol=1e-3, atol=2e-6)
        assert (Qo[written:] == LEFT).all()
        new_k, new_v = unpack(Kc, Vc)
        check_written(k, new_k, position, keys)
        check_written(v, new_v, position, inputs["V"].reshape(m, kv_heads, d)[:written])


@pytest.mark.parametrize(("arch", "name"), [(arch, name) for arch, names in REGISTERS.items() for name in names])
def test_registers_suffice(arch, name):
    assembly = compiled(arch, name).assembly
    for field in ("private_segment_fixed_size", "vgpr_spill_count", "sgpr_spill_count"):
        assert set(re.findall(rf"\.{field}: +(\d+)", assembly)) == {"0"}, field


def test_splits_publish_before_they_arrive():
    """On gfx1100 each store of a split's results is waited for before the counter moves."""
    assembly = compiled("gfx1100", "decode_group_4").assembly
    before = assembly[: assembly.index("global_atomic_add_u32")]
    last_store = before.rindex("global_store")
    assert "s_waitcnt_vscnt null, 0x0" in before[last_store:]


@pytest.mark.parametrize(("ctx", "d"), [(100, 64), (128, 80)])
def test_shapes_that_do_not_fit_are_refused(ctx, d):
    with pytest.raises(UserError, match="multiples"):
        cache_shapes(2, ctx, d)


def test_too_many_heads_for_a_kv_head_are_refused():
    with pytest.raises(UserError, match="query heads"):
        attention(34, 2, 64, 128, 1, "", resolve("gfx1100"), "attention")


def test_int8_from_matrix_units_is_refused():
    with pytest.raises(UserError, match="int8"):
        attention(4, 2, 64, 128, 16, "rows", resolve("gfx1100"), "attention")


def test_odd_rotary_is_refused():
    with pytest.raises(UserError, match="even"):
        rope_kv_write(2, 1, 64, 128, 1, True, 33, None, resolve("gfx1100"), "rope")
