"""RoPE with cache writes on the CPU against numpy in float64; steps and pages are those of `test_cpu_attention.py`."""

from typing import NamedTuple

import numpy as np
import pytest

from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.cpu.attention.kv_write import rope_kv_write
from mlc_amd.schedules.cpu.base.arch import resolve
from mlc_amd.schedules.operators import RopeKvWrite
from mlc_amd.schedules.operators.attention import KV_BLOCK, Attention, Rope
from mlc_amd.tools.reference.attention import (
    CACHES,
    multiplied,
    places_of,
    pools_of,
    quantized,
    rope_reference,
    value_reference,
)
from tests.schedules.cpu.test_cpu_attention import ARCHS, LEFT, STALE, Pool, compiled, tensor, widened


class Write(NamedTuple):
    """One rope_kv_write kernel."""

    spec: Attention
    m: int
    rope: Rope

    def kernel(self, arch, name):
        return rope_kv_write(RopeKvWrite(layer=self.spec, rope=self.rope, m=self.m), arch, name)


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
    "decode codes": Write(heads(4, 2, 64, kv="q8_0"), 1, Rope(True, 48)),
    "prefill codes norms": Write(heads(2, 2, 96, kv="q8_0"), 16, Rope(False, 96, 1e-5, value_norm=True)),
    "prefill 4 bits norms": Write(heads(2, 2, 96, kv="q4_0"), 16, Rope(False, 96, 1e-5, value_norm=True)),
    "decode 8 and 4 bits": Write(heads(4, 2, 128, kv="q8_0/q4_0"), 1, Rope(True, 64)),
    "prefill reads 4 bits": Write(heads(2, 1, 64, kv="q4_0"), 4, Rope(True, 64, writes=False)),
    "prefill reads": Write(heads(3, 1, 64), 4, Rope(True, 64, 1e-5, writes=False)),
    "decode reads": Write(heads(2, 1, 64), 1, Rope(True, 0, writes=False)),
}


OTHER_ARCHS_ROPE = (
    "decode interleaved", "prefill neox partial", "prefill head 24", "prefill norm after", "decode codes",
)  # fmt: skip
ROPE_CASES = [(arch, name) for arch in ARCHS for name in (ROPE if arch == ARCHS[0] else OTHER_ARCHS_ROPE)]


@pytest.mark.parametrize(("arch", "name"), ROPE_CASES)
def test_rope_kv_write(arch, name):
    spec, m, rope = ROPE[name]
    n, kv_heads, d = spec.heads, spec.kv_heads, spec.d
    kernel = compiled(ROPE[name], arch)
    rng = np.random.default_rng(2)
    angles = np.arange(ROPE_CTX)[:, None] * 10000.0 ** (-np.arange(rope.rotary // 2) / max(1, rope.rotary // 2))
    # with a factor, as some models scale their angles' table
    cs = 1.25 * np.stack([np.cos(angles), np.sin(angles)], -1).reshape(ROPE_CTX, rope.rotary).astype(np.float32)
    q, k, v = (rng.standard_normal((m, h * d)).astype(np.float32) for h in (n, kv_heads, kv_heads))
    qn, kn = (rng.standard_normal(d).astype(np.float32) for _ in range(2))
    norms = [] if rope.eps is None else [qn, kn] if rope.writes else [qn]
    tables = [cs] if rope.rotary else []
    starts = {(0, m), (5, max(1, m - 3)), (ROPE_CTX - m, m), (ROPE_CTX - 1, m)}  # the last one has room for one token
    for start, live in starts:
        pool = Pool(spec, 3, rng)
        # two single rows, and a chunk, whose rows after the last position have no place
        alone = 2 if m > 4 else 0
        single = (ROPE_CTX - 1, 40)[:alone]
        step = pool.step(single, start, live - alone, m)
        places = step[1].numpy()[:live]
        here = np.flatnonzero(places[:, 0] < ROPE_CTX)
        positions, slots = places[here].T
        caches = pool.caches(*np.full((2, 3, kv_heads, ROPE_CTX, d), STALE, np.float16))
        before = {name: x.numpy().copy() for name, x in zip(CACHES, caches, strict=False)}
        Qo = tensor(np.full((m, n, spec.width), LEFT, np.float32))
        inputs = [widened(x) for x in ([q, k, v] if rope.writes else [q])] + [widened(x) for x in norms] + tables
        head = step if rope.writes else step[:2]
        kernel(*head, *map(tensor, inputs), *(caches if rope.writes else []), Qo)
        angle = cs[positions]
        expected = rope_reference(q.reshape(m, n, d)[here], angle, rope, qn) * spec.query_scale
        expected = multiplied(expected, spec.rotation)
        np.testing.assert_allclose(Qo.numpy()[here, :, :d], expected, rtol=0, atol=4e-6)
        assert (np.delete(Qo.numpy(), here, axis=0) == LEFT).all()
        if not rope.writes:
            continue
        page, key = places_of(pool.pages, positions, slots)
        keys = rope_reference(k.reshape(m, kv_heads, d)[here], angle, rope, kn)
        values = value_reference(v.reshape(m, kv_heads, d)[here], rope)
        keys, values = (multiplied(x, spec.rotation) for x in (keys, values))
        after = {name: x.numpy() for name, x in zip(CACHES, caches, strict=False)}
        pools = (pools_of("cpu", of) for of in (after, before))
        for found, old, wanted, kind in zip(*pools, (keys, values), (spec.key_codes, spec.value_codes), strict=True):
            if kind:
                codes, scales = quantized(wanted, kind)
                step = np.repeat(scales.astype(np.float64), KV_BLOCK, -1)
                apart = np.abs(found[page, :, key] - codes * step)
                # a code is another one where a number is rounded to the other side
                assert (apart <= np.abs(step) * 1.2).all() and (apart > np.abs(step) * 0.1).mean() < 0.005
            else:
                np.testing.assert_allclose(found[page, :, key, :d], wanted, rtol=6e-4, atol=1e-6)
            changed = found.copy()
            changed[page, :, key, :d] = old[page, :, key, :d]
            np.testing.assert_array_equal(changed, old)


def test_norms_need_an_epsilon():
    with pytest.raises(ValueError, match="without eps"):
        Rope(True, 64, value_norm=True)


def test_odd_rotary_is_refused():
    with pytest.raises(UserError, match="even"):
        Write(heads(2, 1, 64), 1, Rope(True, 33)).kernel(resolve("native"), "rope")
