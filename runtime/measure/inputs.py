"""Inputs of candidates: arrays by role, name and dtype, equal on every machine and in every process.

The numbers are similar to a model's: weights are drawn as in `random_weights` (the candidate has the draw), activations
are normal, int8 activations have matching scales and sums, the cache has normal keys and values, RoPE has its real
table, and experts are random.
"""

import functools
import math
import zlib

import numpy as np

from mlc_amd.runtime.artifact.io_names import PACKED
from mlc_amd.runtime.artifact.random_weights import draw
from mlc_amd.runtime.cache.pages import PAGE
from mlc_amd.runtime.measure.candidate import ROLES, Candidate, Param
from mlc_amd.runtime.sampling.layout import LOGPROB, row_shapes

BLOCK = 32  # columns of int8 activations that share a scale
LINE = 64  # bytes: planes begin at a multiple of this in the block that they repeat
# Approximate size of positive inputs: sums of 16 or 32 squares, and scales of norms that make activations about 1
# (schedules/gpu/linear/deferred_norm.py).
POSITIVE = {"Squares": 16.0, "Scale": 64.0, "NS": 64.0}
drawn = functools.cache(draw)
SIGNATURE = 0xA5  # fill pattern of memory that must not be read, so that reads are noticed


def fill(candidate: Candidate, state, roles=ROLES) -> dict[str, np.ndarray]:
    """The arrays of all parameters with one of the roles, by name; contiguous. state: (position, live rows, single
    rows, 0). Single row i has position - i and slot i. The chunk after the single rows begins at `position`."""
    arrays = {param.name: _MAKERS[param.role](param, state) for param in candidate.params if param.role in roles}
    pair = {"A", "S"} & {p.name for p in candidate.params if p.role == "input"}
    if len(pair) == 2 and "input" in roles:
        a, s = (next(p for p in candidate.params if p.name == name) for name in "AS")
        arrays["A"], arrays["S"] = quantized(a.shape, s.shape)
    return arrays


def _rng(name: str) -> np.random.Generator:
    return np.random.Generator(np.random.SFC64(zlib.crc32(name.encode())))


def _state(param: Param, state) -> np.ndarray:
    _, live, single, _ = state
    return np.array((single, live, 0, 0), np.int32)


def _rows(param: Param, state) -> np.ndarray:
    position, _, single, _ = state
    row = np.arange(param.shape[0])
    chunk = row >= single
    places = np.where(chunk, position + row - single, np.maximum(position - row, 0))
    return np.stack([places, np.where(chunk, single, row)], 1).astype(np.int32)


def _pages(param: Param, state) -> np.ndarray:
    """Page tables. Each slot has all pages of a sequence of full length in a different order; if there are fewer (the
    fact "pages"), page numbers repeat. The page that a single row writes is used by no other row, as others would read
    it meanwhile."""
    slots, blocks = param.shape
    count = param.facts.get("pages", blocks)
    pages = ((np.arange(blocks) + np.arange(slots)[:, None]) % count).astype(np.int32)
    position, _, single, _ = state
    row = np.arange(single)
    pages[row, np.maximum(position - row, 0) // PAGE] = count + row
    return pages


def _cells(param: Param, state) -> np.ndarray:
    """Each slot has a different cell."""
    return np.repeat(np.arange(param.shape[0], dtype=np.int32)[:, None], param.shape[1], 1)


def _input(param: Param, state) -> np.ndarray:
    if param.name == "tokens":
        return _rng(param.name).integers(0, param.facts["vocab"], param.shape, np.int32)
    if param.name in PACKED:  # two texts, the second one longer
        live = min(param.shape[0], state[1])
        half = max(1, live // 3)
        return np.where(np.arange(param.shape[0])[:, None] < half, (0, half), (half % live, live)).astype(np.int32)
    if param.name in row_shapes(1, 1):  # rows select the largest logit, and its log-probability
        return np.full(param.shape, LOGPROB if param.name == "sampling" else 0, np.int32)
    if "experts" in param.facts:
        return routing_tables(param.facts["experts"])[param.name].reshape(param.shape)
    if param.name == "Ids":  # for keys: all rows attend to the first keys
        return np.zeros(param.shape, param.numpy)
    values = _rng(param.name).standard_normal(param.shape, np.float32)
    if param.name == "Qo":  # rotated queries include the softmax's scale, for base 2
        values *= np.float32(math.log2(math.e) / math.sqrt(param.shape[-1]))
    if param.name in POSITIVE:
        values = np.float32(POSITIVE[param.name]) * (1 + np.abs(values))
    return values.astype(param.numpy)


def _weight(param: Param, state) -> np.ndarray:
    if "draw" in param.facts:
        return _plane(param)
    if param.name == "CS":
        positions, rotary = param.shape
        angles = np.arange(positions)[:, None] * 10000.0 ** (-np.arange(0, rotary, 2) / rotary)
        return np.stack([np.cos(angles), np.sin(angles)], -1).reshape(param.shape).astype(np.float32)
    values = _rng(param.name).standard_normal(param.shape, np.float32) * np.float32(0.1)
    if param.name == "A":  # rates at which states decay
        return -np.abs(1 + values)
    return (values if param.name.startswith("bias") else 1 + values).astype(param.numpy)


def _plane(param: Param) -> np.ndarray:
    """A plane, as in `random_weights`. The "signs" of a tensor have one offset, as minimums correspond to scales."""
    pattern = drawn(str(param.numpy), *param.facts["draw"])
    tensor = param.name.rpartition("_")[0]
    start = zlib.crc32((tensor if param.facts["draw"][0] == "signs" else param.name).encode()) * LINE % pattern.nbytes
    whole = np.empty(param.nbytes, np.uint8)
    at = 0
    while at < whole.nbytes:
        piece = pattern[start : start + whole.nbytes - at]
        whole[at : at + piece.nbytes] = piece
        at, start = at + piece.nbytes, 0
    return whole.view(param.numpy).reshape(param.shape)


def _cache(param: Param, state) -> np.ndarray:
    if param.dtype in ("int8", "uint8"):
        pattern = drawn("int8", "bits").view(param.numpy)
    elif param.name in ("Ks", "Vs"):  # scales with which such codes have a similar size
        pattern = np.abs(drawn("float16", "signs", 1 / 64).view(np.float16))
    else:
        pattern = drawn("float16", "normal", 1.0).view(np.float16)
    return np.resize(np.roll(pattern, zlib.crc32(param.name.encode()) % pattern.size), param.shape)


def _states(param: Param, state) -> np.ndarray:
    return _rng(param.name).standard_normal(param.shape, np.float32)


def _unwritten(param: Param, state) -> np.ndarray:
    return np.full(param.nbytes, SIGNATURE, np.uint8).view(param.numpy).reshape(param.shape)


def _zero(param: Param, state) -> np.ndarray:
    return np.zeros(param.shape, param.numpy)


_MAKERS = {
    "state": _state, "rows": _rows, "pages": _pages, "cells": _cells, "input": _input, "weight": _weight,
    "cache": _cache, "states": _states, "output": _unwritten, "work": _unwritten, "zero": _zero,
}  # fmt: skip


def quantized(a_shape: tuple[int, ...], s_shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """(A int8, S float32) of random normal activations, in the layout of these shapes: rows, A [m, KB, 32] and S [m,
    KB, 4] (GPU); or tiles, A [MT, KB, P, 32] and S [MT, KB, 8, P] (CPU)."""
    x = _rng("A").standard_normal(a_shape, np.float32)
    d = np.abs(x).max(-1, keepdims=True) / np.float32(127)
    q = np.rint(x / d).astype(np.int8)
    low, high = (part.sum(-1, dtype=np.int32) for part in (q[..., : BLOCK // 2], q[..., BLOCK // 2 :]))
    d, total = d[..., 0], low + high
    if len(a_shape) == 3:
        return q, np.stack([d, d * total, d * low, d * high], -1).astype(np.float32)
    bits = [np.ascontiguousarray(-part).view(np.float32) for part in (total, low, high)]
    fields = [d, d * total, bits[0], d * low, d * high, bits[1], bits[2], np.zeros_like(d)]
    s = np.empty(s_shape, np.float32)
    for i, values in enumerate(fields):
        s[:, :, i] = values
    return q, s


# ---- routing of rows to random experts. facts["experts"]: see schedules/operators/experts.py


def routing_tables(facts: dict) -> dict[str, np.ndarray]:
    """Ids, Slots, Pairs and Groups, flat int32. Groups are the experts of slots if tiles have one slot."""
    return _tables(*(facts[key] for key in ("count", "used", "tile", "m", "tiles")))


def routed_slots(facts: dict, live: int) -> int:
    """The number of slots up to the last that kernels write. live: rows. Sorted slots are those of all rows."""
    if facts["tile"] == 1:
        return facts["used"] * min(live, facts["m"])
    return int(routing_tables(facts)["Groups"][facts["tiles"] + facts["count"]]) * facts["tile"]


@functools.lru_cache(maxsize=16)
def _tables(count: int, used: int, tile: int, m: int, tiles: int) -> dict[str, np.ndarray]:
    rng = np.random.Generator(np.random.SFC64(count))
    ids = np.argsort(rng.random((m, count)), -1)[:, :used].astype(np.int32).ravel()
    if tile == 1:
        return {"Ids": ids, "Groups": ids}
    counts = np.bincount(ids, minlength=count)
    wanted = -(-counts // tile)
    first, before = np.cumsum(wanted) - wanted, np.cumsum(counts) - counts
    order = np.argsort(ids, kind="stable")
    place = np.empty(len(ids), np.int32)
    place[order] = first[ids[order]] * tile + np.arange(len(ids)) - before[ids[order]]
    pairs = np.full(tiles * tile, -1, np.int32)
    pairs[place] = np.arange(len(ids))
    groups = np.full(tiles, -1, np.int32)
    groups[: wanted.sum()] = np.repeat(np.arange(count), wanted)
    groups = np.concatenate([groups, first, [wanted.sum()], counts]).astype(np.int32)
    return {"Ids": ids, "Slots": place, "Pairs": pairs, "Groups": groups}
