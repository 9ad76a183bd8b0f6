"""Attention on the CPU against numpy in float64.

A state says how many keys the single rows' sequences have, and where the chunk after them is. Sequences are in slots
and pages in no order. Pages begin with stale finite numbers, which must neither matter nor change; pages of keys that a
window leaves out, and those of no sequence, hold NaNs, so that reading them shows.
"""

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import tvm
from samples import sample
from workloads import tiled

from mlc_amd.compiler.codegen.cpu import build_module
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.host import cpu_flags
from mlc_amd.schedules.cpu.attention.attention import attention, default_plan
from mlc_amd.schedules.cpu.attention.cache import cache_types
from mlc_amd.schedules.cpu.base.arch import resolve
from mlc_amd.schedules.operators import CausalAttention
from mlc_amd.schedules.operators.attention import PAGE, SLOTS, Attention
from mlc_amd.tools.reference.attention import as_stored, attention_reference, caches_of, first_seen

os.environ.setdefault("TVM_NUM_THREADS", "2")  # before the first kernel call

ARCHS = [name for name in ("native", "x86-64-v3", "x86-64-v2") if cpu_flags().issuperset(resolve(name).flags)]
STALE = 3.0
LEFT = 7.0  # what outputs hold before a kernel runs
LOG2E = np.log2(np.e)


class State(NamedTuple):
    """A step: the positions of its single rows, (position of the first row, rows) of its chunk, and how many of these,
    at the beginning, are of an image."""

    single: tuple[int, ...] = ()
    chunk: tuple[int, int] = (0, 0)
    image: int = 0

    @property
    def live(self) -> int:
        return len(self.single) + self.chunk[1]


class Attend(NamedTuple):
    """One attention kernel of m rows, up to `single` of which may be single ones, and the states that it is run
    with."""

    spec: Attention
    states: tuple[State, ...]
    m: int = 1
    single: int = 1
    p: int = 1
    quantize: bool = False
    plan: tuple = ()  # (field, value) of the kernel's plan that differ from the default

    def kernel(self, arch, name):
        layout, arch = "tiles" if self.quantize else "", tiled(arch, self.p)
        op = CausalAttention(layer=self.spec, m=self.m, single=self.single, layout=layout)
        return attention(op, arch, name, replace(default_plan(op, arch), **dict(self.plan)) if self.plan else None)


def one(*positions):
    """States of one single row each."""
    return tuple(State((position,)) for position in positions)


def decode(spec, states, **more):
    return Attend(spec, states, **more)


def rows(spec, states, m, **more):
    """All rows are single."""
    return Attend(spec, tuple(State(positions) for positions in states), m, m, **more)


def chunk(spec, states, m, p=1, quantize=False, **more):
    """All rows are a chunk. states: (position, rows) of it."""
    return Attend(spec, tuple(State((), state) for state in states), m, 0, p, quantize, **more)


def mixed(spec, states, m, single, p=1, quantize=False, **more):
    """states: (positions of the single rows, (position, rows) of the chunk)."""
    return Attend(spec, tuple(State(*state) for state in states), m, single, p, quantize, **more)


LENGTHS = one(0, 6, 63, 64, 999, 1023)
DEEP = one(4000, 4095, 70, 0)
# Single rows and a chunk after them: none, one of them, all that there may be; a chunk that begins in a tile.
MIXED = (
    ((), (0, 16)),
    ((500,), (61, 9)),
    ((0, 63, 64, 200, 511), (250, 11)),
    ((5, 300, 17), (0, 1)),
    ((7, 70, 511, 0), (0, 0)),
)
ATTEND = {
    "decode group 4": decode(Attention(8, 2, 64, 1024), LENGTHS),
    "decode group 1": decode(Attention(3, 3, 96, 1024), LENGTHS),
    "decode group 2": decode(Attention(4, 2, 128, 1024), LENGTHS, quantize=True),
    "decode group 8": decode(Attention(8, 1, 32, 1024), LENGTHS),
    "decode group 32": decode(Attention(32, 1, 64, 128), one(99)),
    "rows group 2": rows(
        Attention(4, 2, 64, 320), ((0, 1, 200, 319), (61, 62, 63, 64), (250, 3), (319,)), 4, p=4, quantize=True
    ),
    "rows group 7": rows(Attention(7, 1, 96, 576), ((0, 300, 575), (255, 256, 257), (574, 2)), 3),
    "rows 64": rows(Attention(2, 2, 32, 320), (tuple(range(0, 320, 5)), tuple(range(300, 240, -3))), 64, p=16),
    "chunk group 1": chunk(Attention(2, 2, 128, 192), ((0, 8), (57, 3), (184, 8)), 8, 8, True),
    "chunk group 2": chunk(Attention(4, 2, 96, 192), ((0, 16), (63, 15), (64, 1), (176, 16)), 16, 4, True),
    "chunk group 3": chunk(Attention(3, 1, 32, 256), ((0, 64), (130, 64), (192, 64), (1, 33)), 64, 8, True),
    "chunk group 4": chunk(Attention(8, 2, 64, 1024), ((0, 64), (65, 50), (960, 64)), 64, 8),
    "chunk group 8": chunk(Attention(16, 2, 64, 320), ((0, 128), (190, 128), (3, 100)), 128, 16),
    "mixed group 2": mixed(Attention(4, 2, 64, 512), MIXED, 16, 5, 8),
    "mixed group 4 int8": mixed(Attention(8, 2, 32, 512), MIXED, 16, 5, 8, True),
    "mixed 64": mixed(
        Attention(2, 1, 64, 320),
        ((tuple(range(5, 320, 5)), (13, 60)), (tuple(range(40, 80)), (250, 70)), ((0,), (100, 127))),
        128,
        64,
        16,
    ),
    # heads that are not whole blocks, or not even whole vectors
    "decode head 24": decode(Attention(4, 2, 24, 512), one(0, 64, 511)),
    "rows head 80": rows(Attention(2, 1, 80, 320), ((0, 1, 2), (300, 302, 40)), 3),
    "chunk head 40": chunk(Attention(6, 2, 40, 192), ((0, 16), (63, 15), (176, 16)), 16, 4),
    "mixed head 40": mixed(Attention(6, 2, 40, 512), MIXED, 16, 5, 4),
    # a window that lies in one block, that spans blocks, and at depths of many windows
    "decode window 5": decode(Attention(4, 2, 64, 256, window=5), one(0, 3, 4, 5, 40, 63, 64, 66, 255)),
    "decode window 1": decode(Attention(2, 1, 32, 128, window=1), one(0, 63, 64, 100)),
    "decode window 100": decode(Attention(8, 2, 64, 4096, window=100), DEEP, quantize=True),
    "decode window 700": decode(Attention(4, 1, 64, 4096, window=700), (*DEEP, *one(700, 767, 768, 3071))),
    "rows window 3": rows(Attention(4, 2, 64, 320, window=3), ((0, 1, 2), (62, 64, 63), (255, 256), (317, 4, 319)), 3),
    "rows window 70": rows(
        Attention(4, 2, 64, 1024, window=70), ((0, 3, 68, 71), (132, 135, 326, 1023)), 4, p=4, quantize=True
    ),
    "chunk window 10": chunk(
        Attention(4, 2, 64, 512, window=10), ((0, 16), (4, 16), (60, 16), (250, 9), (496, 16)), 16, 8, True
    ),
    "chunk window 49": chunk(
        Attention(4, 2, 64, 1024, window=49, sinks=True), ((0, 16), (56, 16), (500, 9), (1008, 16)), 16, 8, True
    ),
    "chunk window 100": chunk(Attention(8, 2, 64, 1024, window=100), ((0, 64), (90, 64), (960, 64)), 64, 8),
    "chunk window in a tile": chunk(
        Attention(2, 2, 32, 1024, window=40),
        ((0, 256), (700, 256)),
        256,
        16,
        plan=(("min_rows", 256), ("max_rows", 256)),
    ),
    "mixed window 70": mixed(Attention(4, 2, 64, 512, window=70), MIXED, 16, 5, 8, True),
    # images: as long as a chunk, followed by text, in several tiles, none, with a window, after single rows
    "chunk image": Attend(
        Attention(4, 2, 64, 512, images=True),
        (State((), (57, 64), 64), State((), (0, 60), 41), State((), (250, 64), 3), State((), (448, 64))),
        64,
        0,
        8,
        True,
        (("min_rows", 16), ("max_rows", 32)),
    ),
    "mixed image window": Attend(
        Attention(3, 1, 32, 512, window=20, images=True),
        (State((500, 3), (57, 60), 47), State((), (130, 64), 64)),
        66,
        2,
        8,
    ),
    # chunks of keys: within one, at its ends, rows of two of them
    "decode keys of 40": decode(Attention(4, 2, 64, 512, chunk=40), one(0, 39, 40, 79, 130, 511)),
    "rows keys of 40": rows(Attention(4, 2, 64, 512, chunk=40), ((0, 39, 40, 41), (38, 318, 319, 320)), 4),
    "chunk keys of 100": chunk(Attention(4, 2, 64, 512, chunk=100), ((0, 64), (90, 64), (390, 50)), 64, 8),
    "chunk keys of 10": chunk(Attention(2, 2, 64, 1024, chunk=10), ((0, 16), (60, 16), (995, 16)), 16, 8, True),
    "mixed keys of 40": mixed(Attention(4, 2, 64, 512, chunk=40), MIXED, 16, 5, 8),
    # the other attributes
    "rows sinks": rows(Attention(8, 2, 64, 1024, sinks=True), ((0, 1, 2), (640, 642, 5)), 3, p=3, quantize=True),
    "chunk softcap": chunk(Attention(4, 1, 64, 512, softcap=4.0), ((0, 16), (400, 16)), 16, 8),
    "decode all": decode(Attention(6, 2, 64, 1024, 0.2, 300, 6.0, True), LENGTHS, quantize=True),
    "chunk all": chunk(Attention(6, 2, 64, 1024, 0.2, 300, 6.0, True), ((0, 16), (290, 16), (1008, 16)), 16, 8, True),
    "mixed all": mixed(Attention(6, 2, 64, 512, 0.2, 300, 6.0, True), MIXED, 16, 5, 8, True),
    # a quantized cache
    "decode q8": decode(Attention(8, 2, 64, 1024, kv="q8_0"), LENGTHS),
    "decode q8 window": decode(Attention(3, 3, 96, 1024, window=100, kv="q8_0"), LENGTHS, quantize=True),
    "rows q8": rows(Attention(4, 1, 128, 320, kv="q8_0"), ((0, 1, 200, 319), (319,)), 4, p=4),
    "chunk q8": chunk(Attention(4, 2, 32, 512, kv="q8_0"), ((0, 16), (63, 15), (480, 16)), 16, 8),
    "chunk q8 direct": chunk(Attention(2, 1, 64, 512, kv="q8_0"), ((0, 16), (300, 16)), 16, plan=(("convert", 0),)),
    "mixed q8 all": mixed(Attention(6, 2, 64, 512, 0.2, 300, 6.0, True, kv="q8_0"), MIXED, 16, 5, 8, True),
    "decode q4": decode(Attention(8, 2, 64, 1024, kv="q4_0"), LENGTHS),
    "chunk q4 direct": chunk(Attention(2, 1, 96, 512, kv="q4_0"), ((0, 16), (300, 16)), 16, plan=(("convert", 0),)),
    "mixed q4 all": mixed(Attention(6, 2, 64, 512, 0.2, 300, 6.0, True, kv="q8_0/q4_0"), MIXED, 16, 5, 8, True),
}
# What an instruction set besides the machine's own computes, and what only tests marked full do.
OTHER_ARCHS = ("decode group 4", "chunk head 40", "decode window 100", "mixed keys of 40", "mixed q8 all")  # fmt: skip
FULL = (
    "decode group 1", "decode group 2", "decode group 32", "rows group 2", "chunk group 1", "chunk group 2",
    "chunk group 8", "mixed 64", "rows head 80", "mixed head 40", "decode window 1", "decode window 700",
    "rows window 70", "chunk window 10", "chunk window 100", "decode keys of 40", "chunk keys of 100", "rows sinks",
    "chunk softcap", "decode all", "decode q8 window", "rows q8", "chunk group 3", "chunk group 4", "decode group 8",
    "mixed group 4 int8", "decode head 24", "mixed window 70", "chunk window 49", "rows keys of 40", "chunk keys of 10",
    "mixed group 2", "chunk q8", "chunk all",
)  # fmt: skip


ATTEND_CASES = [
    pytest.param(arch, name, marks=pytest.mark.full if name in FULL or name not in some else ())
    for arch, some in zip(ARCHS, (ATTEND, OTHER_ARCHS, OTHER_ARCHS), strict=False)
    for name in ATTEND
]


def compiled(case, arch):
    """A case's kernel, ready to call."""
    kernel = case.kernel(resolve(arch), "kernel")
    return build_module({"kernel": kernel}, resolve(arch).target)["kernel"]


def tensor(x):
    return tvm.runtime.tensor(np.ascontiguousarray(x))


def dequantize(A, S, m):
    """The first m tokens [m, k] of the activation planes, and a step of the quantization for each value."""
    blocks = A.transpose(0, 2, 1, 3).reshape(-1, A.shape[1], 32)[:m]
    d = S[:, :, 0].transpose(0, 2, 1).reshape(-1, A.shape[1], 1)[:m]
    return (blocks * d.astype(np.float64)).reshape(m, -1), np.broadcast_to(d, blocks.shape).reshape(m, -1)


def widened(x):
    """Heads [.., d] with their padding, which holds what must not matter."""
    return np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % 16)], constant_values=STALE)


class Pool:
    """Pages of the sequences of a step, in no order, and two more. slots: of the single rows, and of the chunk."""

    def __init__(self, spec, sequences, rng):
        self.spec, self.count = spec, sequences * spec.blocks + 2
        self.slots = rng.permutation(SLOTS)[:sequences]
        order = rng.permutation(self.count)
        self.pages = np.full((SLOTS, spec.blocks), order[-1], np.int32)
        self.pages[self.slots] = order[: sequences * spec.blocks].reshape(sequences, -1)

    def caches(self, k, v):
        """The cache of k, v [sequences, kv_heads, ctx, d]; NaNs in pages of no sequence."""
        pooled = []
        for x in map(widened, (k, v)):
            sequences, kv_heads, _, width = x.shape
            pool = np.full((self.count, kv_heads, PAGE, width), np.nan, x.dtype)
            blocks = x.reshape(sequences, kv_heads, self.spec.blocks, PAGE, width).transpose(0, 2, 1, 3, 4)
            pool[self.pages[self.slots]] = blocks
            pooled.append(pool)
        return tuple(map(tensor, caches_of("cpu", self.spec, *pooled).values()))

    def step(self, single: Sequence[int], first: int, chunk: int, m: int, image: int = 0):
        """The parameters state, rows and pages of a step: positions of single rows, and a chunk. Sequences are in the
        order of the slots. Rows that are not live hold what must not matter."""
        table = np.full((m, 2), 1 << 30, np.int32)
        live = len(single) + chunk
        table[:live, 0] = [*single, *range(first, first + chunk)]
        table[:live, 1] = [*self.slots[: len(single)], *[self.slots[-1]] * chunk]
        state = np.array([len(single), live, image, 0], np.int32)
        return tensor(state), tensor(table), tensor(self.pages)


@pytest.mark.parametrize(("arch", "name"), ATTEND_CASES)
def test_attention(arch, name):
    spec, states, m, _, p, quantize, _ = ATTEND[name]
    heads, d, rng = spec.heads, spec.d, np.random.default_rng(1)
    kernel = compiled(ATTEND[name], arch)
    q = rng.standard_normal((m, heads, d)).astype(np.float32) * 2
    sinks = (rng.standard_normal(heads) * 2 + 5).astype(np.float32)
    for state in states:
        (single, (first, count), image), live = state, state.live
        # (first position, rows) of each sequence in the step
        steps = [*((position, 1) for position in single), *([(first, count)] if count else [])]
        pool = Pool(spec, len(steps), rng)
        k, v = (rng.standard_normal((len(steps), spec.kv_heads, spec.ctx, d)).astype(np.float16) for _ in "kv")
        if spec.quantized:
            k, v = as_stored(k, spec.key_codes), as_stored(v, spec.value_codes)
        expected = []
        for sequence, (position, taken) in enumerate(steps):
            end, unseen = position + taken, first_seen(spec, position) // PAGE * PAGE
            exact = [x[sequence, :, :end].astype(np.float64) for x in (k, v)]
            queries = q[len(expected) : len(expected) + taken].astype(np.float64)
            own_sinks = sinks.astype(np.float64) if spec.sinks else None
            seen = first + image if image and sequence == len(single) else 0
            expected.extend(attention_reference(spec, queries, *exact, position, own_sinks, seen))
            k[sequence, :, end:], v[sequence, :, end:] = STALE * 100, STALE * 10000
            k[sequence, :, :unseen] = v[sequence, :, :unseen] = np.nan  # blocks that no row sees must not be read
        expected = np.array(expected)
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
        inputs = [tensor(widened(queries)), *pool.caches(k, v), *([tensor(sinks)] if spec.sinks else [])]
        kernel(*pool.step(single, first, count, m, image), *inputs, *out)
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


SAME = {  # attributes, position of the first token
    "causal": ({}, 505),
    "q8": ({"kv": "q8_0"}, 505),
    # the windows of a chunk of 16 begin in one span, those of its last rows in the next
    "all": ({"window": 189, "softcap": 5.0, "sinks": True}, 690),
}
KINDS = {  # (m, single) of kernels, and how they take 16 rows: those of each step, the first of which are single ones
    "decode": ((1, 1), [(1, 1)] * 16),
    "rows": ((4, 4), [(4, 4)] * 4),
    "chunk": ((16, 0), [(16, 0)]),
    "chunks": ((16, 0), [(5, 0), (11, 0)]),
    "mixed": ((16, 7), [(16, 7)]),
    "mixed, few": ((16, 7), [(3, 1), (7, 7), (6, 0)]),
}


@pytest.mark.parametrize(
    ("arch", "name"), sample([(arch, name) for arch in ARCHS for name in SAME], [(ARCHS[0], "all"), (ARCHS[-1], "all")])
)
def test_a_row_gets_the_same_bits_in_any_function(arch, name):
    """The rows are consecutive ones of a sequence; as single rows, each is in a slot of its own, with the same
    pages."""
    attributes, position = SAME[name]
    spec, tokens = Attention(4, 2, 64, 768, **attributes), 16
    shapes = {shape: "attend_" + "_".join(map(str, shape)) for shape, _ in KINDS.values()}
    made = {of: Attend(spec, (), *shape, shape[0]).kernel(resolve(arch), of) for shape, of in shapes.items()}
    module, rng = build_module(made, resolve(arch).target), np.random.default_rng(3)
    q = rng.standard_normal((tokens, spec.heads, spec.d)).astype(np.float32)
    pool = Pool(spec, 1, rng)
    inputs = [*pool.caches(*rng.standard_normal((2, 1, spec.kv_heads, spec.ctx, spec.d)).astype(np.float16))]
    pool.slots = np.concatenate([rng.permutation(np.delete(np.arange(SLOTS), pool.slots))[:tokens], pool.slots])
    pool.pages[pool.slots[:-1]] = pool.pages[pool.slots[-1]]
    if spec.sinks:
        inputs.append(tensor(np.array([-np.inf, 0.3, 1.7, 30], np.float32)))
    results = []
    for (m, single), steps in KINDS.values():
        found, at = [], 0
        for live, alone in steps:
            out, own = tensor(np.zeros((m, spec.heads * spec.d), np.float32)), np.zeros((m, *q.shape[1:]), np.float32)
            own[:live], first = q[at : at + live], position + at
            step = pool.step(range(first, first + alone), first + alone, live - alone, m)
            module[shapes[m, single]](*step, tensor(own), *inputs, out)
            found.append(out.numpy()[:live])
            at += live
        results.append(np.concatenate(found))
    assert all(np.array_equal(result, results[0]) for result in results) and np.abs(results[0]).min() > 0


@pytest.mark.parametrize(("ctx", "d"), [(100, 64), (128, 20)])
def test_shapes_that_do_not_fit_are_refused(ctx, d):
    with pytest.raises(UserError, match="multiples"):
        cache_types(Attention(4, 2, d, ctx))


def test_a_quantized_cache_needs_whole_blocks():
    with pytest.raises(UserError, match="--kv-type q8_0 needs heads in multiples of 32, not of 80"):
        cache_types(Attention(4, 2, 80, 128, kv="q8_0"))


def test_int8_blocks_of_parts_of_heads_are_refused():
    with pytest.raises(UserError, match="blocks of 32 columns, not of heads of 48"):
        Attend(Attention(4, 2, 48, 128), (), quantize=True).kernel(resolve("native"), "attention")
