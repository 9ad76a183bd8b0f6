"""Where long steps are cut: estimates, their corrections by what runs took, and pieces that cover every launch once."""

import numpy as np
import pytest

from mlc_amd.runtime.devices.pieces import LIMIT, Pacer

CONTEXT, ROWS = 131072, 512
GB = 10**9
HEADS, WIDTH = 32, 128


def kernel(name, call=0, key=0, operations=0, score=0, keys=CONTEXT, zero=False):
    params = [{"role": "weight"}, {"role": "zero" if zero else "output"}]
    moved = {"call": call, "token": 0, "key": key}
    return {"name": name, "bytes": moved, "operations": {"call": operations, "score": score}, "keys": keys,
            "params": params}  # fmt: skip


def launched(*grids):
    return {"scratch": [], "steps": [{"grid": list(grid), "block": [64, 1, 1]} for grid in grids]}


def manifest(bandwidth=100, layers=4, zero=False):
    """A model of a few layers with long contexts: the decoder's step, and chunks of 512 rows."""
    scores, blocks = 4 * HEADS * WIDTH, ("norm", "linear", "attention")
    chunk = {"logits": 1, "launches": [{"kernel": name} for _ in range(layers) for name in blocks]}
    single = {"logits": 1, "launches": [{"kernel": name} for _ in range(layers) for name in ("gemv", "attention")]}
    attention = [(8, HEADS, 1), (32, 1, 1)]
    steps = {"norm": [(ROWS, 1, 1)], "linear": [(1, 96, 1)], "gemv": [(96, 1, 1)], "attention": attention}
    return {
        "target": {"bandwidth": {"gpu": bandwidth}},
        "context": CONTEXT,
        "kernels": [
            kernel("norm"),
            kernel("linear", call=GB // 10, operations=2 * ROWS * 10**8),
            kernel("attention", key=4096, score=scores, zero=zero),
            kernel("gemv", call=GB // 10, operations=2 * 10**8),
        ],
        "launches": {"gpu": {name: launched(*grids) for name, grids in steps.items()}},
        "functions": {
            "decode": single | {"rows": 1, "single": 1},
            "prefill": chunk | {"rows": ROWS, "single": 0},
            "mixed": chunk | {"rows": ROWS, "single": 8},
        },
    }


def place(pacer, position, single=0, live=ROWS):
    """A step whose single rows and chunk all follow `position` tokens."""
    positions = np.where(np.arange(live) < single, position, position + np.arange(live) - single)
    pacer.write("state", (single, live, 0, 0))
    pacer.write("rows", np.stack([positions, np.zeros(live, int)], 1).astype(np.int32))


def check_cover(pieces, entry):
    """Every workgroup of every launch once, in order."""
    grids = [max(step["grid"]) for call in entry["functions"]["prefill"]["launches"]
             for step in entry["launches"]["gpu"][call["kernel"]]["steps"]]  # fmt: skip
    parts = [part for piece in pieces for part in piece]
    found = {}
    for part in parts:
        assert part.first == found.get(part.launch, 0) < part.end
        found[part.launch] = part.end
    assert [part.launch for part in parts] == sorted(part.launch for part in parts)
    assert all(part.whole or part.groups == grids[part.launch] for part in parts)
    ends = [next(p.groups for p in parts if p.launch == i) for i in range(len(grids))]
    assert [found[i] for i in range(len(grids))] == ends


def test_short_steps_are_one_submission():
    pacer = Pacer(manifest(), "gpu", cuts=True)
    place(pacer, CONTEXT - 1, 1, 1)
    assert pacer.pieces("decode") == ()
    place(pacer, 0)
    assert pacer.pieces("prefill") != ()  # before anything is known of the device: 0.5 s of products
    pacer.record("prefill", 0.02)
    assert pacer.pieces("prefill") == ()


def test_pieces_follow_the_position():
    entry = manifest()
    pacer = Pacer(entry, "gpu", cuts=True)
    counts = []
    for position in (0, 8192, 32768, 100_000):
        place(pacer, position)
        pieces = pacer.pieces("prefill")
        check_cover(pieces, entry)
        counts.append(len(pieces))
    assert counts == sorted(counts) and counts[-1] > 2 * counts[1] > 2
    place(pacer, 100_100)
    assert pacer.pieces("prefill") is pieces  # what was recorded serves a while
    place(pacer, 100_000, 8)
    few = pacer.pieces("mixed")
    place(pacer, 0, 8)  # the same single rows and chunk at the beginning
    assert len(pacer.pieces("mixed")) < len(few)


def test_a_window_ends_the_growth():
    entry = manifest()
    entry["kernels"][2]["keys"] = 1024
    pacer = Pacer(entry, "gpu", cuts=True)
    place(pacer, 2048)
    pieces = pacer.pieces("prefill")
    place(pacer, 100_000)
    assert pacer.pieces("prefill") is pieces


@pytest.mark.parametrize(("cuts", "zero"), [(False, False), (True, True)])
def test_launches_that_must_stay_whole(cuts, zero):
    """Of a device that launches whole grids; of kernels that count arrivals."""
    pacer = Pacer(manifest(zero=zero), "gpu", cuts=cuts)
    place(pacer, CONTEXT - ROWS)
    parts = [part for piece in pacer.pieces("prefill") for part in piece]
    attention = [part for part in parts if part.launch % 4 == 2]
    assert len(attention) == 4 and all(part.whole for part in attention)
    divided = Pacer(manifest(), "gpu", cuts=True)
    place(divided, CONTEXT - ROWS)
    assert sum(not part.whole for piece in divided.pieces("prefill") for part in piece) > 8


@pytest.mark.parametrize("bandwidth", [0, 100, 1000])
@pytest.mark.parametrize(("fixed", "deep"), [(0.05, 0.01), (1.0, 1.0), (0.2, 3.0), (8.0, 0.5)])
def test_runs_correct_the_estimate(bandwidth, fixed, deep):
    """A device whose times are not the table's: while a prompt grows, no submission after the first step takes much
    longer than the limit, and few are much shorter than needed."""
    pacer, truth = (Pacer(manifest(rate), "gpu", cuts=True) for rate in (bandwidth, 100))
    spent, needed = [], 0.0
    for position in range(0, CONTEXT - ROWS, 2 * ROWS):
        place(pacer, position)
        places = np.arange(position, position + ROWS)
        seconds = [fixed * a + deep * b for a, b in truth._functions["prefill"].seconds(places[:1], places)]
        for piece in pacer.pieces("prefill") or ((),):
            shares = [seconds[part.launch] * (part.end - part.first) / part.groups for part in piece] or seconds
            pacer.record("prefill", sum(shares), piece)
            if position:
                spent.append(sum(shares))
        needed += sum(seconds) / LIMIT
    assert max(spent) < 1.2 * LIMIT
    assert len(spent) < 3 * needed + CONTEXT / ROWS / 2


def test_an_outlier_is_forgotten():
    """A suspended machine."""
    pacer = Pacer(manifest(), "gpu", cuts=True)
    place(pacer, 0)
    pacer.record("prefill", 0.02)
    pacer.record("prefill", 3600.0)
    pieces = pacer.pieces("prefill")
    assert len(pieces) > 1
    for piece in pieces:
        pacer.record("prefill", 0.02 / len(pieces), piece)
    assert pacer.pieces("prefill") == ()
