"""RoPE with cache writes, and attention, on the CPU against numpy in float64.

Every case is a chunk in the middle of a sequence. The caches start with stale finite numbers, which must neither matter
nor change. All cases of an architecture are compiled together.
"""

import functools
import os
from typing import NamedTuple

import numpy as np
import pytest
import tvm

from mlc_amd.compiler.codegen.cpu import build_module
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.host import cpu_flags
from mlc_amd.schedules.cpu.arch import resolve
from mlc_amd.schedules.cpu.attention import attention
from mlc_amd.schedules.cpu.rope_kv_write import cache_shapes, rope_kv_write

os.environ.setdefault("TVM_NUM_THREADS", "2")  # before the first kernel call

ARCHS = [name for name in ("native", "x86-64-v3", "x86-64-v2") if cpu_flags().issuperset(resolve(name).flags)]
STALE = 3.0
LEFT = 7.0  # what outputs hold before a kernel runs
LOG2E = np.log2(np.e)


class Attend(NamedTuple):
    """One attention kernel and the (position, live) states that it is run with."""

    heads: int
    kv_heads: int
    d: int
    ctx: int
    states: tuple
    m: int = 1
    p: int = 1
    quantize: bool = False


LENGTHS = tuple((length - 1, 1) for length in (1, 7, 64, 65, 1000, 1024))
ATTEND = {
    "decode group 4": Attend(8, 2, 64, 1024, LENGTHS),
    "decode group 1": Attend(3, 3, 96, 1024, LENGTHS),
    "decode group 2": Attend(4, 2, 128, 1024, LENGTHS, quantize=True),
    "decode group 7": Attend(14, 2, 64, 1024, LENGTHS, quantize=True),
    "decode group 8": Attend(8, 1, 32, 1024, LENGTHS),
    "decode group 32": Attend(32, 1, 64, 128, ((99, 1),)),
    "few group 2": Attend(4, 2, 64, 320, ((0, 4), (61, 4), (250, 2), (316, 4), (63, 1)), 4, 4, True),
    "few group 7": Attend(7, 1, 96, 576, ((0, 3), (255, 3), (574, 2), (300, 1)), 3),
    "prefill group 1": Attend(2, 2, 128, 192, ((0, 8), (57, 3), (184, 8)), 8, 16, True),
    "prefill group 2": Attend(4, 2, 96, 192, ((0, 16), (63, 15), (64, 1), (176, 16)), 16, 4, True),
    "prefill group 3": Attend(3, 1, 32, 256, ((0, 64), (130, 64), (192, 64), (1, 33)), 64, 8, True),
    "prefill group 4": Attend(8, 2, 64, 1024, ((0, 64), (65, 50), (960, 64)), 64, 8),
    "prefill group 8": Attend(16, 2, 64, 320, ((0, 128), (190, 128), (3, 100)), 128, 16),
}
OTHER_ARCHS = ("decode group 4", "decode group 1", "decode group 8", "prefill group 2", "prefill group 3")


class Rope(NamedTuple):
    """One rope_kv_write kernel."""

    heads: int
    kv_heads: int
    d: int
    m: int
    neox: bool
    rotary: int
    eps: float | None = None


ROPE_CTX = 128
ROPE = {
    "decode neox": Rope(4, 2, 64, 1, True, 64),
    "decode interleaved": Rope(4, 2, 64, 1, False, 64),
    "decode norm": Rope(4, 4, 128, 1, True, 128, 1e-6),
    "prefill neox partial": Rope(3, 1, 96, 16, True, 48),
    "prefill interleaved partial": Rope(2, 1, 64, 16, False, 24),
    "prefill norm": Rope(2, 2, 32, 16, False, 32, 1e-5),
    "prefill narrow": Rope(2, 1, 32, 8, True, 20),
}


@functools.cache
def kernels(arch):
    """The compiled cases of an architecture."""
    isa, target = resolve(arch).isa, resolve(arch).target
    names = ATTEND if arch == ARCHS[0] else OTHER_ARCHS
    funcs = {
        n: attention(*ATTEND[n][:4], ATTEND[n].m, ATTEND[n].p, ATTEND[n].quantize, isa, n.replace(" ", "_"))
        for n in names
    }
    for n, c in ROPE.items():
        funcs[n] = rope_kv_write(
            c.heads, c.kv_heads, c.d, ROPE_CTX, c.m, c.neox, c.rotary, c.eps, isa, "rope_" + n.replace(" ", "_")
        )
    mod = build_module({f.attrs["global_symbol"]: f for f in funcs.values()}, target)
    return {n: mod[f.attrs["global_symbol"]] for n, f in funcs.items()}


def tensor(x):
    return tvm.runtime.tensor(np.ascontiguousarray(x))


def state(position, live):
    return tensor(np.array([position, live, 0, 0], np.int32))


def attention_reference(q, k, v, position):
    """q [live, heads, d], in natural units; k, v [kv_heads, keys, d]: [live, heads * d], all float64."""
    live, heads, d = q.shape
    rows = q.reshape(live, len(k), -1, d)
    scores = np.einsum("thgd,hnd->thgn", rows, k) / np.sqrt(d)
    scores = np.where(np.arange(k.shape[1]) <= position + np.arange(live)[:, None, None, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("thgn,hnd->thgd", weights / weights.sum(-1, keepdims=True), v).reshape(live, heads * d)


def dequantize(A, S, m):
    """The first m tokens [m, k] of the activation planes, and a step of the quantization for each value."""
    blocks = A.transpose(0, 2, 1, 3).reshape(-1, A.shape[1], 32)[:m]
    d = S[:, :, 0].transpose(0, 2, 1).reshape(-1, A.shape[1], 1)[:m]
    return (blocks * d.astype(np.float64)).reshape(m, -1), np.broadcast_to(d, blocks.shape).reshape(m, -1)


ATTEND_CASES = [(arch, name) for arch in ARCHS for name in (ATTEND if arch == ARCHS[0] else OTHER_ARCHS)]


@pytest.mark.parametrize(("arch", "name"), ATTEND_CASES)
def test_attention(arch, name):
    heads, kv_heads, d, ctx, states, m, p, quantize = ATTEND[name]
    rng = np.random.default_rng(1)
    q = rng.standard_normal((m, heads, d)).astype(np.float32) * 2
    for position, live in states:
        k, v = (rng.standard_normal((kv_heads, ctx, d)).astype(np.float16) for _ in "kv")
        k[:, position + live :] = STALE * 100
        v[:, position + live :] = STALE * 10000
        keys, values = tensor(k.reshape(kv_heads, ctx // 16, 16, d).transpose(0, 1, 3, 2)), tensor(v)
        queries = (q * (LOG2E / np.sqrt(d))).astype(np.float32)
        queries[live:] = np.nan
        columns = heads * d
        if quantize:
            tiles = -(-m // p)
            A, S = (
                tensor(np.zeros((tiles, columns // 32, p, 32), np.int8)),
                tensor(np.full((tiles, columns // 32, 8, p), LEFT, np.float32)),
            )
            out = (A, S)
        else:
            out = (tensor(np.full((m, columns), LEFT, np.float32)),)
        kernels(arch)[name](state(position, live), tensor(queries), keys, values, *out)
        expected = attention_reference(
            q[:live].astype(np.float64), *(x[:, : position + live].astype(np.float64) for x in (k, v)), position
        )
        scale = np.abs(expected).max()
        if quantize:
            got, step = dequantize(A.numpy(), S.numpy(), live)
            assert (np.abs(got - expected) <= step * 0.501 + scale * 1e-5).all()
            assert step.max() < scale / 100
            untouched = S.numpy().transpose(0, 3, 1, 2).reshape(-1, columns // 32, 8)[live:]
            assert (untouched == LEFT).all()
        else:
            got = out[0].numpy()
            assert np.abs(got[:live] - expected).max() <= scale * 1e-5
            assert (got[live:] == LEFT).all()


@pytest.mark.parametrize("arch", ARCHS)
def test_a_token_gets_the_same_bits_in_any_chunk(arch):
    heads, kv_heads, d, ctx, tokens, position = 4, 2, 64, 576, 16, 505
    isa, target, chunks = resolve(arch).isa, resolve(arch).target, (1, 4, 16)
    module = build_module(
        {f"chunk_{m}": attention(heads, kv_heads, d, ctx, m, m, False, isa, f"chunk_{m}") for m in chunks}, target
    )
    rng = np.random.default_rng(3)
    q = rng.standard_normal((tokens, heads, d)).astype(np.float32)
    caches = [tensor(rng.standard_normal(shape).astype(np.float16)) for shape in cache_shapes(kv_heads, ctx, d)]
    results = []
    for m in chunks:
        rows = []
        for first in range(0, tokens, m):
            out = tensor(np.zeros((m, heads * d), np.float32))
            module[f"chunk_{m}"](state(position + first, m), tensor(q[first : first + m]), *caches, out)
            rows.append(out.numpy())
        results.append(np.concatenate(rows))
    assert all(np.array_equal(result, results[0]) for result in results) and np.abs(results[0]).min() > 0


def rope_reference(x, cs, neox, rotary, eps, weight):
    """x [tokens, heads, d], cs [tokens, rotary] as in the kernel's table: the rotated heads in float64."""
    x, cs = x.astype(np.float64), cs.astype(np.float64)[:, None]
    if eps is not None:
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight
    half = rotary // 2
    first, second = (slice(0, half), slice(half, rotary)) if neox else (slice(0, rotary, 2), slice(1, rotary, 2))
    y = x.copy()
    y[..., first] = x[..., first] * cs[..., ::2] - x[..., second] * cs[..., 1::2]
    y[..., second] = x[..., first] * cs[..., 1::2] + x[..., second] * cs[..., ::2]
    return y


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", ROPE)
def test_rope_kv_write(arch, name):
    heads, kv_heads, d, m, neox, rotary, eps = ROPE[name]
    rng = np.random.default_rng(2)
    angles = np.arange(ROPE_CTX)[:, None] * 10000.0 ** (-np.arange(rotary // 2) / (rotary // 2))
    cs = np.stack([np.cos(angles), np.sin(angles)], -1).reshape(ROPE_CTX, rotary).astype(np.float32)
    q, k, v = (rng.standard_normal((m, h * d)).astype(np.float32) for h in (heads, kv_heads, kv_heads))
    norms = [] if eps is None else [rng.standard_normal(d).astype(np.float32) for _ in range(2)]
    qn, kn = norms or (None, None)
    states = {
        (0, m),
        (5, max(1, m - 3)),
        (ROPE_CTX - m, m),
        (ROPE_CTX - 1, m),
    }  # the last one has no room for more than one token
    for position, live in states:
        written = min(live, ROPE_CTX - position)
        Kc, Vc = (tensor(np.full(shape, STALE, np.float16)) for shape in cache_shapes(kv_heads, ROPE_CTX, d))
        Qo = tensor(np.full((m, heads, d), LEFT, np.float32))
        kernels(arch)[name](state(position, live), *map(tensor, (q, k, v, *norms, cs)), Kc, Vc, Qo)
        rows = cs[position : position + written]
        expected = rope_reference(q.reshape(m, heads, d)[:written], rows, neox, rotary, eps, qn) * LOG2E / np.sqrt(d)
        np.testing.assert_allclose(Qo.numpy()[:written], expected, rtol=0, atol=2e-6)
        assert (Qo.numpy()[written:] == LEFT).all()
        got_k = Kc.numpy().transpose(0, 1, 3, 2).reshape(kv_heads, ROPE_CTX, d)
        keys = rope_reference(k.reshape(m, kv_heads, d)[:written], rows, neox, rotary, eps, kn)
        here = slice(position, position + written)
        np.testing.assert_allclose(got_k[:, here].transpose(1, 0, 2), keys, rtol=6e-4, atol=1e-6)
        assert (Vc.numpy()[:, here].transpose(1, 0, 2) == v.reshape(m, kv_heads, d)[:written].astype(np.float16)).all()
        for cache in (got_k, Vc.numpy()):
            assert (np.delete(cache, np.arange(position, position + written), axis=1) == STALE).all()


@pytest.mark.parametrize(("ctx", "d"), [(100, 64), (128, 80)])
def test_shapes_that_do_not_fit_are_refused(ctx, d):
    with pytest.raises(UserError, match="multiples"):
        cache_shapes(2, ctx, d)


def test_odd_rotary_is_refused():
    with pytest.raises(UserError, match="even"):
        rope_kv_write(2, 1, 64, 128, 1, True, 33, None, resolve("native").isa, "rope")
