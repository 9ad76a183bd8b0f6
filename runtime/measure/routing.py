"""The routing of rows in candidates of a mixture of experts' kernels: random experts, equal on every machine.

In: a parameter's facts "experts": count, used, tile and m, as schedules/operators/experts.py has them, and tiles. Out:
the tables that its kernels read, and the number of slots that they use.
"""

import functools

import numpy as np


def tables(facts: dict) -> dict[str, np.ndarray]:
    """Ids, Slots, Pairs and Groups, flat int32; Groups are the experts of slots where tiles have one slot."""
    return _tables(*(facts[key] for key in ("count", "used", "tile", "m", "tiles")))


def slots(facts: dict, live: int) -> int:
    """Slots from the first to the last that kernels write. live: rows; sorted slots are those of all rows."""
    if facts["tile"] == 1:
        return facts["used"] * min(live, facts["m"])
    return int(tables(facts)["Groups"][facts["tiles"] + facts["count"]]) * facts["tile"]


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
