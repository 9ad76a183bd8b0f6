"""The kernels of a mixture of experts on the CPU against numpy: each kernel on what the one before it made, decode and
prefill on every instruction set that this machine runs."""

import functools
import os
from typing import NamedTuple

import numpy as np
import pytest
import tvm
from workloads import built, operator

from mlc_amd.compiler.codegen.cpu import build_module
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.host import cpu_flags
from mlc_amd.schedules.cpu.base.arch import Avx2, Portable, resolve, tile_rows
from mlc_amd.schedules.formats import FORMATS
from mlc_amd.schedules.operators.experts import Experts
from mlc_amd.tools.reference.experts import gate_up, linear, order, route
from tests.schedules.cpu.test_cpu_linear import error, weights

os.environ.setdefault("TVM_NUM_THREADS", "2")  # before the first kernel call

# one of each instruction set that this machine runs
RUNNABLE = [name for name in ("x86-64-v2", "x86-64-v3", "native") if cpu_flags().issuperset(resolve(name).flags)]
ARCHS = list({resolve(name).isa: name for name in RUNNABLE}.values())
LEFT = 7.0  # what outputs hold before a kernel runs
TOLERANCE = 1e-5  # of the largest result

# (gating, further arguments, experts, used)
ROUTERS = {
    "softmax": ("softmax", {}, 40, 6),
    "softmax-normalize": ("softmax", {"normalize": True, "scale": 2.5}, 128, 8),
    "softmax_used": ("softmax_used", {}, 32, 4),
    "sigmoid-bias": ("sigmoid", {"bias": True, "normalize": True}, 20, 3),
    "sigmoid-groups": ("sigmoid", {"bias": True, "normalize": True, "groups": 8, "groups_used": 3}, 512, 18),
    "sqrt_softplus": ("sqrt_softplus", {"bias": True, "normalize": True}, 20, 3),
    "factors": ("softmax", {"factors": True, "normalize": True}, 16, 16),
    "groups-of-one": ("softmax", {"groups": 4, "groups_used": 2}, 4, 2),
}
ROUTED = {1: 1, 5: 4}  # rows: live ones
SOME_ROUTERS = ("softmax-normalize", "sigmoid-groups")  # of archs that are not the machine's own


class Block(NamedTuple):
    """Experts' matrices: formats of gate, up and down, `n` columns between them."""

    gate: str
    up: str
    down: str
    act: str = "silu"
    k: int = 256
    n: int = 256
    count: int = 6
    used: int = 2
    biases: bool = False
    weigh_input: bool = False
    residual: bool = False

    @property
    def kind(self):
        return FORMATS[self.gate].kind

    def of(self, m, arch):
        return Experts(self.count, self.used, 1 if m == 1 else tile_rows(m, resolve(arch)))

    def layout(self, fmt, of):
        return f"tiles:{of.tile}" if FORMATS[fmt].kind == "int8" else ""

    def workloads(self, m, arch):
        """Operator: its workload's arguments."""
        of = self.of(m, arch)
        experts = {"m": m, "experts": of.count, "used": of.used, "tile": of.tile}
        first, second = self.layout(self.gate, of), self.layout(self.down, of)
        after = {"weighted": not self.weigh_input, "residual": self.residual}
        found = {
            "gather": {"k": self.k, "weighted": self.weigh_input, "layout": first},
            "expert_gate_up": {
                "gate": self.gate, "up": self.up, "n": self.n, "k": self.k, "biases": self.biases, "act": self.act,
                "layout_in": first, "layout": second, "shared": m == 1 and not self.weigh_input,
            },
        }  # fmt: skip
        down = {"fmt": self.down, "n": self.k, "k": self.n, "bias": self.biases, "layout": second}
        if m == 1:
            found["expert_down"] = down | after
            if not self.weigh_input:
                del found["gather"]
        else:
            found |= {"expert_order": {}, "expert_linear": down, "combine": {"n": self.k} | after}
        return {op: args | experts for op, args in found.items()}


BLOCKS = {
    "k-quants": Block("q4_k", "q4_k", "q6_k", residual=True),
    "biases": Block("q8_0", "q8_0", "q8_0", "swiglu_oai", k=64, n=96, count=5, used=3, biases=True),
    "float": Block("f16", "f16", "f16", "gelu", k=64, n=64, biases=True, residual=True),
    "weighted input": Block("q4_k", "q6_k", "f16", k=256, n=32, used=1, weigh_input=True),
}
ROWS = {1: 1, 4: 4, 64: 59}  # of a step: live ones
EXACT = "k-quants"  # of integers only, whose sums have one order
# By instruction set: blocks, and rows of their steps. Kernels of many rows that quantize their results compile slowly.
OWN = {"k-quants": (1, 4, 64), "biases": (1, 4), "float": (1, 4, 64), "weighted input": (1, 4)}
SOME = {
    Portable: {"biases": (1, 4), "float": (1, 4)},
    Avx2: {"k-quants": (1, 4), "biases": (1,), "float": (1,)},
}


def cases(arch):
    """(block, rows of a step) to test on an arch."""
    some = OWN if arch == ARCHS[-1] else SOME[resolve(arch).isa]
    return [(name, m) for name, rows in some.items() for m in rows]


def routes(arch):
    """(router, rows of a step) to test on an arch."""
    return [(name, m) for name in (ROUTERS if arch == ARCHS[-1] else SOME_ROUTERS) for m in ROUTED]


@functools.cache
def library(arch):
    """All kernels of an arch, by name."""
    funcs, target = {}, resolve(arch)
    for name, m in routes(arch):
        gating, attributes, experts, used = ROUTERS[name]
        args = {"normalize": False, "scale": 1.0, "bias": False, "factors": False, "groups": 1, "groups_used": 1}
        args |= {"n": -(-experts // 16) * 16, "m": m, "experts": experts, "used": used, "tile": 1, **attributes}
        funcs[f"route {name} {m}"] = operator("route", args | {"gating": gating})
    for name, m in cases(arch):
        for op, args in BLOCKS[name].workloads(m, arch).items():
            funcs[f"{op} {name} {m}"] = operator(op, args)
    plain = {name: name.replace(" ", "_").replace("-", "_") for name in funcs}
    made = {plain[name]: built(op, target, plain[name]) for name, op in funcs.items()}
    module = build_module(made, target.target)
    return {name: module[symbol] for name, symbol in plain.items()}


def call(arch, name, live, *arrays, outputs):
    """The outputs of a kernel on numpy arrays; `outputs`: as they are before."""
    tensors = [tvm.runtime.tensor(np.ascontiguousarray(a)) for a in (np.array([3, live, 0, 0], np.int32), *arrays)]
    results = [tvm.runtime.tensor(a) for a in outputs]
    library(arch)[name](*tensors, *results)
    return [t.numpy() for t in results]


def unwritten(shape, dtype=np.float32):
    return np.full(shape, LEFT, dtype)


# ---- the router


@pytest.mark.parametrize(("arch", "name", "m"), [(arch, *route) for arch in ARCHS for route in routes(arch)])
def test_route(arch, name, m):
    gating, attributes, experts, used = ROUTERS[name]
    rng, n, live = np.random.default_rng(len(name)), -(-experts // 16) * 16, ROUTED[m]
    logits = (rng.standard_normal((m, n)) * 4).astype(np.float32)
    logits[0, 1] = logits[0, experts // 2] = logits[0, :experts].max() + 1  # of equal ones the first comes first
    logits[:, experts:] = 1e9  # padding
    vectors = {key: rng.uniform(0.1, 1, n).astype(np.float32) for key in ("bias", "factors") if key in attributes}
    if "bias" in vectors:
        vectors["bias"][experts // 2] = vectors["bias"][1]
    outputs = [unwritten((m, used), np.int32), unwritten((m, used))]
    ids, found = call(arch, f"route {name} {m}", live, logits, *vectors.values(), outputs=outputs)
    expected = route(
        logits[:live, :experts], used, gating, **{**attributes, **{k: v[:experts] for k, v in vectors.items()}}
    )
    np.testing.assert_array_equal(ids[:live], expected[0])
    np.testing.assert_allclose(found[:live], expected[1], rtol=2e-6, atol=1e-37)
    assert (found[live:] == LEFT).all() and (ids[live:] == LEFT).all()


@pytest.mark.parametrize("arch", ARCHS)
def test_route_of_numbers_that_are_none_gives_experts(arch):
    logits = np.full((1, 128), np.nan, np.float32)
    outputs = [unwritten((1, 8), np.int32), unwritten((1, 8))]
    ids, _ = call(arch, "route softmax-normalize 1", 1, logits, outputs=outputs)
    assert ((ids >= 0) & (ids < 128)).all()


# ---- the experts' matrices


def activations(m, k, of, quantized):
    """Outputs of a kernel that makes rows [m, k] in tiles, before it runs."""
    if not quantized:
        return [unwritten((m, k))]
    tiles = m // of.tile
    return [np.full((tiles, k // 32, of.tile, 32), 7, np.int8), unwritten((tiles, k // 32, 8, of.tile))]


def values(arrays):
    """The rows that activations stand for, and half of a step of each value (0: float32)."""
    if len(arrays) == 1:
        return arrays[0].astype(np.float64), 0
    q, d = arrays[0].swapaxes(1, 2).astype(np.float64), arrays[1][:, :, 0].swapaxes(1, 2)[..., None].astype(np.float64)
    rows = q.shape[0] * q.shape[1]
    return (q * d).reshape(rows, -1), np.broadcast_to(d / 2, q.shape).reshape(rows, -1)


class Run:
    """A block's kernels on random rows, each checked against numpy on what the one before it made. y: [live, k]."""

    def __init__(self, arch, name, m, rows=None):
        self.arch, self.name, self.block, self.m = arch, name, BLOCKS[name], m
        self.live, self.of = ROWS[m], self.block.of(m, arch)
        self.slots = self.of.slots(m)
        b, rng = self.block, np.random.default_rng(7)
        x, residual = (rng.standard_normal((64, b.k)).astype(np.float32) for _ in range(2))
        # few rows choose the last expert, most the first
        ids = np.array([np.argsort(rng.random(b.count) * np.arange(1, b.count + 1))[: b.used] for _ in range(64)])
        scales = rng.uniform(0.1, 1, (64, b.used)).astype(np.float32)
        rows = np.arange(m) if rows is None else rows
        self.x, self.residual, self.scales = x[rows], residual[rows], scales[rows]
        self.ids = ids[rows].astype(np.int32)
        self.matrices = {}
        sizes = {"gate": (b.gate, b.n, b.k), "up": (b.up, b.n, b.k), "down": (b.down, b.k, b.n)}
        for i, (which, (fmt, n, k)) in enumerate(sizes.items()):
            planes, w = weights(fmt, b.count * n, k, i)
            # results of a size at which activations bend
            bias = [rng.standard_normal(b.count * n).astype(np.float32)] if b.biases else []
            self.matrices[which] = (list(planes.values()), w.reshape(b.count, n, k), bias)
        self.y = self._run()

    def _call(self, op, *arrays, outputs):
        return call(self.arch, f"{op} {self.name} {self.m}", self.live, *arrays, outputs=outputs)

    def _order(self):
        """(rows, j of each used slot), Slots, Pairs, Groups."""
        of, m, live = self.of, self.m, self.live
        sizes = (m, of.used), (self.slots,), (of.groups(m),)
        found = self._call("expert_order", self.ids, outputs=[unwritten(s, np.int32) for s in sizes])
        slots, pairs, *groups = order(self.ids[:live], of.count, of.tile, of.tiles(m))
        np.testing.assert_array_equal(found[0], np.concatenate([slots, np.zeros((m - live, of.used), int)]))
        np.testing.assert_array_equal(found[1], pairs)
        np.testing.assert_array_equal(found[2], np.concatenate(groups))
        return found

    def _gather(self, pairs):
        b, of = self.block, self.of
        inputs = [self.x, *([pairs] if self.m > 1 else []), *([self.scales] if b.weigh_input else [])]
        made = self._call("gather", *inputs, outputs=activations(self.slots, b.k, of, b.kind == "int8"))
        got, step = values(made)
        used = np.flatnonzero(pairs >= 0)
        rows, j = pairs[used] // of.used, pairs[used] % of.used
        expected = self.x[rows].astype(np.float64) * (self.scales[rows, j][:, None] if b.weigh_input else 1)
        assert (np.abs(got[used] - expected) <= 1.001 * (step[used] if b.kind == "int8" else 0) + 1e-6).all()
        tiles = np.unique(used // of.tile)
        padding = (tiles[:, None] * of.tile + np.arange(of.tile)).ravel()
        assert (got[np.setdiff1d(padding, used)] == 0).all()
        return made

    def _run(self):
        b, of, m = self.block, self.of, self.m
        if m == 1:
            slots, pairs, groups = np.arange(of.used)[None], np.arange(of.used, dtype=np.int32), self.ids
        else:
            slots, pairs, groups = self._order()
        if m > 1 or b.weigh_input:
            x = self._gather(pairs)
        elif b.kind == "int8":
            x = quantized_row(self.x)
        else:
            x = [self.x]
        used = np.flatnonzero(pairs >= 0)
        experts = self.ids.ravel()[pairs[used]]
        # gate and up
        (gate, g, gb), (up, u, ub), (down, d, db) = self.matrices.values()
        quantized = FORMATS[b.down].kind == "int8"
        h = self._call("expert_gate_up", *x, groups, *gate, *up, *gb, *ub, outputs=activations(
            self.slots, b.n, of, quantized))  # fmt: skip
        source = np.resize(values(x)[0], (self.slots, b.k))[used]
        expected = np.empty((len(used), b.n))
        for e in np.unique(experts):
            biases = [v[0].reshape(b.count, b.n)[e] if b.biases else None for v in (gb, ub)]
            expected[experts == e] = gate_up(source[experts == e], g[e], u[e], b.act, biases)
        got, step = values(h)
        tolerance = TOLERANCE * np.abs(expected).max()
        assert (np.abs(got[used] - expected) <= tolerance + 1.001 * (step[used] if quantized else 0)).all()
        # down, and the sum
        residual = [self.residual] if b.residual else []
        scales = [] if b.weigh_input else [self.scales]
        source = got[used]
        results = np.zeros((self.slots, b.k))
        for e in np.unique(experts):
            bias = db[0].reshape(b.count, b.k)[e] if b.biases else None
            results[used[experts == e]] = linear(source[experts == e], d[e], bias)
        total = (results[slots[: self.live]] * (1 if b.weigh_input else self.scales[: self.live, :, None])).sum(1)
        total += self.residual[: self.live] if b.residual else 0
        if m == 1:
            (y,) = self._call("expert_down", *h, groups, *down, *db, *scales, *residual, outputs=[unwritten((1, b.k))])
        else:
            (y,) = self._call("expert_linear", *h, groups, *down, *db, outputs=[unwritten((self.slots, b.k))])
            assert error(y[used], results[used]) < TOLERANCE
            (y,) = self._call("combine", y, slots, *scales, *residual, outputs=[unwritten((m, b.k))])
            assert (y[self.live :] == LEFT).all()
        assert error(y[: self.live], total) < TOLERANCE
        return y[: self.live]


def quantized_row(x):
    """A and S of one row, by the definition of quantize.py."""
    blocks = x.reshape(1, -1, 1, 32)
    d = np.abs(blocks).max(-1) / np.float32(127)
    q = np.rint(blocks * (np.float32(127) / np.abs(blocks).max(-1))[..., None]).astype(np.int8)
    parts = [part.sum(-1, dtype=np.int32) for part in (q, q[..., :16], q[..., 16:])]
    fields = [d, d * parts[0], -parts[0], d * parts[1], d * parts[2], -parts[1], -parts[2], 0 * d]
    fields = [f.view(np.float32) if f.dtype == np.int32 else f.astype(np.float32) for f in fields]
    return [q, np.ascontiguousarray(np.stack(fields, 2))]


@pytest.mark.parametrize(("arch", "name", "m"), [(arch, *case) for arch in ARCHS for case in cases(arch)])
def test_experts(arch, name, m):
    Run(arch, name, m)


def test_results_do_not_depend_on_the_number_of_rows():
    whole = Run(ARCHS[-1], EXACT, 64).y
    np.testing.assert_array_equal(Run(ARCHS[-1], EXACT, 4, np.arange(20, 24)).y, whole[20:24])
    np.testing.assert_array_equal(Run(ARCHS[-1], EXACT, 1, np.array([7])).y, whole[7:8])


def test_matrices_of_odd_sizes_are_refused():
    args = BLOCKS["k-quants"].workloads(4, "x86-64-v3")["expert_linear"] | {"n": 40}
    with pytest.raises(UserError, match="multiple of 16 rows"):
        built(operator("expert_linear", args), resolve("x86-64-v3"))
