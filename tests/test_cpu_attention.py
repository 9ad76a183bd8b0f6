"""RoPE with cache writes, and attention, on the CPU against numpy in float64.

Every case is a chunk in the middle of a sequence. The caches start with stale finite numbers, which must neither matter
nor change; blocks of keys that a window leaves out hold NaNs, so that reading them shows. All
cases of an architecture are compiled together.
"""

import functools
import os
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import tvm

from mlc_amd.compiler.codegen.cpu import build_module
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.host import cpu_flags
from mlc_amd.schedules.attention import Attention, Rope
from mlc_amd.schedules.cpu import attention_prefill
from mlc_amd.schedules.cpu.arch import resolve
from mlc_amd.schedules.cpu.attention import attention
from mlc_amd.schedules.cpu.cache import cache_types
from mlc_amd.schedules.cpu.rope_kv_write import rope_kv_write
from mlc_amd.tools.reference.attention import attention_reference, first_seen, in_ring, rope_reference, value_reference

os.environ.setdefault("TVM_NUM_THREADS", "2")  # before the first kernel call

ARCHS = [name for name in ("native", "x86-64-v3", "x86-64-v2") if cpu_flags().issuperset(resolve(name).flags)]
STALE = 3.0
LEFT = 7.0  # what outputs hold before a kernel runs
LOG2E = np.log2(np.e)


class Attend(NamedTuple):
    """One attention kernel and the (position, live) states that it is run with."""

    spec: Attention
    states: tuple
    m: int = 1
    p: int = 1
    quantize: bool = False
    plan: tuple = ()  # (field, value) of prefill's plan that differ from the default

    def kernel(self, isa, name):
        plan = replace(attention_prefill.default_plan(isa), **dict(self.plan)) if self.plan else None
        return attention(self.spec, self.m, self.p, self.quantize, isa, name, plan)


LENGTHS = tuple((length - 1, 1) for length in (1, 7, 64, 65, 1000, 1024))
DEEP = ((4000, 1), (4095, 1), (70, 1), (0, 1))
ATTEND = {
    "decode group 4": Attend(Attention(8, 2, 64, 1024), LENGTHS),
    "decode group 1": Attend(Attention(3, 3, 96, 1024), LENGTHS),
    "decode group 2": Attend(Attention(4, 2, 128, 1024), LENGTHS, quantize=True),
    "decode group 7": Attend(Attention(14, 2, 64, 1024), LENGTHS, quantize=True),
    "decode group 8": Attend(Attention(8, 1, 32, 1024), LENGTHS),
    "decode group 32": Attend(Attention(32, 1, 64, 128), ((99, 1),)),
    "few group 2": Attend(
        Attention(4, 2, 64, 320), ((0, 4), (61, 4), (250, 2), (316, 4), (63, 1)), m=4, p=4, quantize=True
    ),
    "few group 7": Attend(Attention(7, 1, 96, 576), ((0, 3), (255, 3), (574, 2), (300, 1)), m=3),
    "prefill group 1": Attend(Attention(2, 2, 128, 192), ((0, 8), (57, 3), (184, 8)), m=8, p=16, quantize=True),
    "prefill group 2": Attend(
        Attention(4, 2, 96, 192), ((0, 16), (63, 15), (64, 1), (176, 16)), m=16, p=4, quantize=True
    ),
    "prefill group 3": Attend(
        Attention(3, 1, 32, 256), ((0, 64), (130, 64), (192, 64), (1, 33)), m=64, p=8, quantize=True
    ),
    "prefill group 4": Attend(Attention(8, 2, 64, 1024), ((0, 64), (65, 50), (960, 64)), m=64, p=8),
    "prefill group 8": Attend(Attention(16, 2, 64, 320), ((0, 128), (190, 128), (3, 100)), m=128, p=16),
    # heads that are not whole blocks, or not even whole vectors
    "decode head 24": Attend(Attention(4, 2, 24, 512), ((0, 1), (64, 1), (511, 1))),
    "few head 80": Attend(Attention(2, 1, 80, 320), ((0, 3), (300, 3)), m=3),
    "prefill head 40": Attend(Attention(6, 2, 40, 192), ((0, 16), (63, 15), (176, 16)), m=16, p=4),
    # a window that lies in one block, that spans blocks, and at depths of many windows
    "decode window 5": Attend(
        Attention(4, 2, 64, 256, window=5), tuple((n, 1) for n in (0, 3, 4, 5, 40, 63, 64, 66, 255))
    ),
    "decode window 1": Attend(Attention(2, 1, 32, 128, window=1), ((0, 1), (63, 1), (64, 1), (100, 1))),
    "decode window 100": Attend(Attention(8, 2, 64, 4096, window=100), DEEP, quantize=True),
    "decode window 700": Attend(Attention(4, 1, 64, 4096, window=700), (*DEEP, (700, 1), (767, 1))),
    "few window 3": Attend(Attention(4, 2, 64, 320, window=3), ((0, 3), (62, 3), (255, 2), (317, 3)), m=3),
    "few window 70": Attend(
        Attention(4, 2, 64, 1024, window=70), ((0, 4), (68, 4), (132, 4), (326, 4), (1020, 4)), m=4, p=4, quantize=True
    ),
    "prefill window 10": Attend(
        Attention(4, 2, 64, 512, window=10), ((0, 16), (4, 16), (60, 16), (250, 9), (496, 16)), 16, 8, True
    ),
    "prefill window 100": Attend(Attention(8, 2, 64, 1024, window=100), ((0, 64), (90, 64), (960, 64)), 64, 8),
    "prefill window in a tile": Attend(
        Attention(2, 2, 32, 1024, window=40),
        ((0, 256), (700, 256)),
        256,
        16,
        plan=(("min_rows", 256), ("max_rows", 256)),
    ),
    # rings: behind several turns, at their edges, with a window as wide as the ring allows
    "decode ring": Attend(
        Attention(4, 2, 64, 1024, window=64, ring=64), tuple((n, 1) for n in (0, 63, 64, 100, 700, 1023))
    ),
    "decode ring of spans": Attend(Attention(2, 1, 64, 4096, window=700, ring=768), (*DEEP, (767, 1), (3071, 1))),
    "few ring": Attend(Attention(4, 2, 48, 1024, window=61, ring=64), ((0, 4), (62, 4), (509, 4), (1020, 4)), m=4),
    "prefill ring": Attend(
        Attention(4, 2, 64, 1024, window=49, ring=64, sinks=True),
        ((0, 16), (56, 16), (500, 9), (1008, 16)),
        16,
        8,
        True,
    ),
    "prefill ring of blocks": Attend(Attention(2, 1, 64, 2048, window=200, ring=320), ((1800, 64), (290, 64)), 64, 8),
    # chunks: within one, at its ends, rows of two chunks
    "decode chunk": Attend(Attention(4, 2, 64, 512, chunk=40), tuple((n, 1) for n in (0, 39, 40, 79, 130, 511))),
    "few chunk": Attend(Attention(4, 2, 64, 512, chunk=40), ((0, 4), (38, 4), (318, 4)), m=4),
    "prefill chunk": Attend(Attention(4, 2, 64, 512, chunk=100), ((0, 64), (90, 64), (390, 50)), 64, 8),
    "prefill chunk ring": Attend(
        Attention(2, 2, 64, 1024, chunk=10, ring=64), ((0, 16), (60, 16), (995, 16)), 16, 8, True
    ),
    # the other attributes
    "decode scale": Attend(Attention(4, 2, 64, 256, scale=0.3), ((200, 1),)),
    "decode softcap": Attend(Attention(8, 2, 64, 1024, softcap=4.0), LENGTHS),
    "decode sinks": Attend(Attention(8, 2, 64, 1024, sinks=True), LENGTHS),
    "few sinks": Attend(Attention(8, 2, 64, 1024, sinks=True), ((0, 3), (640, 3)), 3, 3, True),
    "prefill softcap": Attend(Attention(4, 1, 64, 512, softcap=4.0), ((0, 16), (400, 16)), 16, 8),
    "prefill sinks": Attend(Attention(8, 2, 64, 1024, sinks=True), ((0, 16), (900, 13)), 16, 8, True),
    "decode all": Attend(Attention(6, 2, 64, 1024, 0.2, 300, 6.0, True), LENGTHS, quantize=True),
    "few all": Attend(Attention(6, 2, 64, 1024, 0.2, 300, 6.0, True), ((0, 4), (297, 4), (1020, 4)), 4, 4),
    "prefill all": Attend(
        Attention(6, 2, 64, 1024, 0.2, 300, 6.0, True), ((0, 16), (290, 16), (1008, 16)), 16, 8, True
    ),
}
OTHER_ARCHS = (
    "decode group 4", "decode group 1", "decode group 8", "prefill head 40", "prefill group 2", "prefill group 3",
    "decode window 100", "few window 70", "prefill ring", "prefill chunk ring", "prefill window 10",
    "decode all", "prefill all",
)  # fmt: skip


class Write(NamedTuple):
    """One rope_kv_write kernel."""

    spec: Attention
    m: int
    rope: Rope

    def kernel(self, isa, name):
        return rope_kv_write(self.spec, self.rope, self.m, isa, name)


ROPE_CTX = 128


def heads(*shape, **attributes):
    return Attention(*shape, ROPE_CTX, **attributes)


ROPE = {
    "decode neox": Write(heads(4, 2, 64), 1, Rope(True, 64)),
    "decode interleaved": Write(heads(4, 2, 64), 1, Rope(False, 64)),
    "decode norm": Write(heads(4, 4, 128), 1, Rope(True, 128, 1e-6)),
    "prefill neox partial": Write(heads(3, 1, 96), 16, Rope(True, 48)),
    "prefill interleaved partial": Write(heads(2, 1, 64), 16, Rope(False, 24)),
    "prefill norm": Write(heads(2, 2, 32), 16, Rope(False, 32, 1e-5)),
    "prefill narrow": Write(heads(2, 1, 32), 8, Rope(True, 20)),
    "decode unrotated": Write(heads(4, 2, 64), 1, Rope(True, 0)),
    "prefill unrotated norm": Write(heads(2, 1, 96), 8, Rope(True, 0, 1e-5)),
    "prefill head 24": Write(heads(3, 1, 24), 4, Rope(True, 12, 1e-5)),
    "decode head 80": Write(heads(2, 1, 80), 1, Rope(False, 32)),
    "prefill scale": Write(heads(2, 1, 64, scale=0.25), 4, Rope(True, 64)),
    "prefill norm after": Write(heads(2, 1, 64), 4, Rope(True, 48, 1e-5, norm_after=True)),
    "decode norm after": Write(heads(2, 1, 40), 1, Rope(False, 24, 1e-5, norm_after=True)),
    "prefill value norm": Write(heads(2, 2, 24), 4, Rope(True, 24, 1e-5, value_norm=True)),
    "prefill into a ring": Write(Attention(2, 1, 64, ROPE_CTX, ring=64), 16, Rope(True, 64)),
    "prefill reads": Write(heads(3, 1, 64), 4, Rope(True, 64, 1e-5, writes=False)),
    "decode reads": Write(heads(2, 1, 64), 1, Rope(True, 0, writes=False)),
}


OTHER_ARCHS_ROPE = ("decode interleaved", "prefill neox partial", "prefill head 24", "prefill norm after")
ATTEND_CASES = [(arch, name) for arch in ARCHS for name in (ATTEND if arch == ARCHS[0] else OTHER_ARCHS)]
ROPE_CASES = [(arch, name) for arch in ARCHS for name in (ROPE if arch == ARCHS[0] else OTHER_ARCHS_ROPE)]


@functools.cache
def kernels(arch):
    """The compiled cases of an architecture."""
    isa, target = resolve(arch).isa, resolve(arch).target
    funcs = {n: ATTEND[n].kernel(isa, n.replace(" ", "_")) for of, n in ATTEND_CASES if of == arch}
    funcs |= {n: ROPE[n].kernel(isa, "rope_" + n.replace(" ", "_")) for of, n in ROPE_CASES if of == arch}
    mod = build_module({f.attrs["global_symbol"]: f for f in funcs.values()}, target)
    return {n: mod[f.attrs["global_symbol"]] for n, f in funcs.items()}


def tensor(x):
    return tvm.runtime.tensor(np.ascontiguousarray(x))


def state(position, live):
    return tensor(np.array([position, live, 0, 0], np.int32))


def dequantize(A, S, m):
    """The first m tokens [m, k] of the activation planes, and a step of the quantization for each value."""
    blocks = A.transpose(0, 2, 1, 3).reshape(-1, A.shape[1], 32)[:m]
    d = S[:, :, 0].transpose(0, 2, 1).reshape(-1, A.shape[1], 1)[:m]
    return (blocks * d.astype(np.float64)).reshape(m, -1), np.broadcast_to(d, blocks.shape).reshape(m, -1)


def widened(x):
    """Heads [.., d] with their padding, which holds what must not matter."""
    return np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % 16)], constant_values=STALE)


def caches(k, v):
    """Kc and Vc of k, v [kv_heads, ctx, d]."""
    k, v = widened(k), widened(v)
    kv_heads, ctx, width = k.shape
    return tensor(k.reshape(kv_heads, ctx // 16, 16, width).transpose(0, 1, 3, 2)), tensor(v)


@pytest.mark.parametrize(("arch", "name"), ATTEND_CASES)
def test_attention(arch, name):
    spec, states, m, p, quantize, _ = ATTEND[name]
    heads, d, rng = spec.heads, spec.d, np.random.default_rng(1)
    q = rng.standard_normal((m, heads, d)).astype(np.float32) * 2
    sinks = (rng.standard_normal(heads) * 2 + 5).astype(np.float32)
    for position, live in states:
        k, v = (rng.standard_normal((spec.kv_heads, spec.ctx, d)).astype(np.float16) for _ in "kv")
        exact = [x[:, : position + live].astype(np.float64) for x in (k, v)]
        k[:, position + live :] = STALE * 100
        v[:, position + live :] = STALE * 10000
        unseen = first_seen(spec, position) // 64 * 64
        # blocks that no row sees must not be read, unless the ring has seen keys in their places
        k[:, :unseen] = v[:, :unseen] = STALE * 100 if spec.ring else np.nan
        k, v = (in_ring(spec, x, position + live) for x in (k, v))
        queries = (q * (LOG2E * (spec.scale or 1 / np.sqrt(d)))).astype(np.float32)
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
        inputs = [tensor(widened(queries)), *caches(k, v), *([tensor(sinks)] if spec.sinks else [])]
        kernels(arch)[name](state(position, live), *inputs, *out)
        expected = attention_reference(
            spec, q[:live].astype(np.float64), *exact, position, sinks.astype(np.float64) if spec.sinks else None
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


CHUNKS = {  # attributes, position of the first token
    "causal": ({}, 505),
    # the windows of a chunk of 16 begin in one span, those of its last rows in the next
    "window": ({"window": 189}, 690),
    "all": ({"window": 189, "softcap": 5.0, "sinks": True}, 690),
}


@pytest.mark.parametrize(
    ("arch", "name"), [(arch, name) for arch in ARCHS for name in (CHUNKS if arch == ARCHS[0] else ("all",))]
)
def test_a_token_gets_the_same_bits_in_any_chunk(arch, name):
    attributes, position = CHUNKS[name]
    spec, tokens, chunks = Attention(4, 2, 64, 768, **attributes), 16, (1, 4, 16)
    isa, target = resolve(arch).isa, resolve(arch).target
    module = build_module({f"chunk_{m}": attention(spec, m, m, False, isa, f"chunk_{m}") for m in chunks}, target)
    rng = np.random.default_rng(3)
    q = rng.standard_normal((tokens, spec.heads, spec.d)).astype(np.float32)
    inputs = [*caches(*rng.standard_normal((2, spec.kv_heads, spec.ctx, spec.d)).astype(np.float16))]
    if spec.sinks:
        inputs.append(tensor(np.array([-np.inf, 0.3, 1.7, 30], np.float32)))
    results = []
    for m in chunks:
        rows = []
        for first in range(0, tokens, m):
            out = tensor(np.zeros((m, spec.heads * spec.d), np.float32))
            module[f"chunk_{m}"](state(position + first, m), tensor(q[first : first + m]), *inputs, out)
            rows.append(out.numpy())
        results.append(np.concatenate(rows))
    assert all(np.array_equal(result, results[0]) for result in results) and np.abs(results[0]).min() > 0


@pytest.mark.parametrize(("arch", "name"), ROPE_CASES)
def test_rope_kv_write(arch, name):
    spec, m, rope = ROPE[name]
    n, kv_heads, d = spec.heads, spec.kv_heads, spec.d
    rng = np.random.default_rng(2)
    angles = np.arange(ROPE_CTX)[:, None] * 10000.0 ** (-np.arange(rope.rotary // 2) / max(1, rope.rotary // 2))
    # with a factor, as some models scale their angles' table
    cs = 1.25 * np.stack([np.cos(angles), np.sin(angles)], -1).reshape(ROPE_CTX, rope.rotary).astype(np.float32)
    q, k, v = (rng.standard_normal((m, h * d)).astype(np.float32) for h in (n, kv_heads, kv_heads))
    qn, kn = (rng.standard_normal(d).astype(np.float32) for _ in range(2))
    norms = [] if rope.eps is None else [qn, kn] if rope.writes else [qn]
    tables = [cs] if rope.rotary else []
    states = {
        (0, m),
        (5, max(1, m - 3)),
        (ROPE_CTX - m, m),
        (ROPE_CTX - 1, m),
    }  # the last one has no room for more than one token
    for position, live in states:
        written = min(live, ROPE_CTX - position)
        Kc, Vc = caches(*np.full((2, kv_heads, spec.places, d), STALE, np.float16))
        Qo = tensor(np.full((m, n, spec.width), LEFT, np.float32))
        inputs = [widened(x) for x in ([q, k, v] if rope.writes else [q])] + [widened(x) for x in norms] + tables
        cache = [Kc, Vc] if rope.writes else []
        kernels(arch)[name](state(position, live), *map(tensor, inputs), *cache, Qo)
        rows = cs[position : position + written]
        expected = rope_reference(q.reshape(m, n, d)[:written], rows, rope, qn) * spec.query_scale
        np.testing.assert_allclose(Qo.numpy()[:written, :, :d], expected, rtol=0, atol=4e-6)
        assert (Qo.numpy()[written:] == LEFT).all()
        if not rope.writes:
            continue
        got_k = Kc.numpy().transpose(0, 1, 3, 2).reshape(kv_heads, spec.places, spec.width)[..., :d]
        keys = rope_reference(k.reshape(m, kv_heads, d)[:written], rows, rope, kn)
        here = np.arange(position, position + written) % spec.places
        np.testing.assert_allclose(got_k[:, here].transpose(1, 0, 2), keys, rtol=6e-4, atol=1e-6)
        got_v, values = Vc.numpy()[..., :d], value_reference(v.reshape(m, kv_heads, d)[:written], rope)
        np.testing.assert_allclose(got_v[:, here].transpose(1, 0, 2), values, rtol=6e-4, atol=1e-6)
        for cache in (got_k, got_v):
            assert (np.delete(cache, here, axis=1) == STALE).all()


@pytest.mark.parametrize(("ctx", "d"), [(100, 64), (128, 20)])
def test_shapes_that_do_not_fit_are_refused(ctx, d):
    with pytest.raises(UserError, match="multiples"):
        cache_types(Attention(4, 2, d, ctx))


def test_int8_blocks_of_parts_of_heads_are_refused():
    with pytest.raises(UserError, match="blocks of 32 columns, not of heads of 48"):
        Attend(Attention(4, 2, 48, 128), (), quantize=True).kernel(resolve("native").isa, "attention")


def test_norms_need_an_epsilon():
    with pytest.raises(ValueError, match="without eps"):
        Rope(True, 64, value_norm=True)


def test_odd_rotary_is_refused():
    with pytest.raises(UserError, match="even"):
        Write(heads(2, 1, 64), 1, Rope(True, 33)).kernel(resolve("native").isa, "rope")
