"""The time of one step by kernel, which `mlc-amd bench --per-kernel` shows, and the memory traffic of launches.

In: an engine whose device can time kernels. Out: a table as data (`measure`), which JSON output holds, and as text
(`text`).

Bytes are those of weights and cache only, a lower bound; activations are not counted. Operations are those
of the linear layers, two per weight and token. Both follow from the manifest: which planes of which tensors a launch
takes, and their shapes.
"""

import re
from collections import defaultdict

import numpy as np

from mlc_amd.schedules.formats import PLANE_BITS
from mlc_amd.tools import display

ROUNDS = 7  # timings of a step, of which each launch takes its median
_CACHE = re.compile(r"[kv]\.\d+")  # the caches themselves; a device may keep more among them
_ONLY_WRITES = "rope_kv_write"  # how the names of kernels begin that write new positions and read none


def decode_bytes(artifact, depth: float) -> float:
    """Bytes that decoding one token reads when the cache holds `depth` tokens before it: weights, keys and values."""
    return sum(traffic(artifact, launch, 1, depth) for launch in artifact.manifest["functions"]["decode"]["launches"])


def traffic(artifact, launch: dict, tokens: int, depth: float) -> float:
    """Bytes of weights and cache that a launch must move for `tokens` tokens behind `depth` others.

    Of the embedding and RoPE's table a token needs one row, which does not count.
    """
    manifest, places = artifact.manifest, artifact.weights.places
    positions = tokens if launch["kernel"].startswith(_ONLY_WRITES) else depth + tokens
    sizes = {
        entry["name"]: int(np.prod(entry["shape"], dtype=np.int64)) * np.dtype(entry["dtype"]).itemsize
        for entry in manifest["kv"]
    }
    cache = sum(sizes[name] for kind, name, *_ in launch["args"] if kind == "kv" and _CACHE.fullmatch(name))
    return sum(places[name][1] for name in _weights(launch)) + cache / manifest["context"] * positions


def operations(artifact, launch: dict, function: dict) -> int:
    """Additions and multiplications of a launch's linear layers, padding included; 0 for other kernels."""
    rows = 1 if ["io", "logits"] in launch["args"] and not function["all_logits"] else function["tokens"]
    return 2 * rows * sum(_count(artifact.weights, name) for name in _weights(launch))


def _weights(launch: dict) -> list[str]:
    """The weights that a launch reads whole."""
    if ["io", "tokens"] in launch["args"]:
        return []
    return [name for kind, name, *_ in launch["args"] if kind == "weight" and name != "rope.table"]


def _count(weights, name: str) -> int:
    """How many weights of a matrix a plane holds; each is counted once, in the plane of its (largest) codes."""
    tensor, _, plane = name.partition("/")
    if plane == "W":
        return int(np.prod(weights.header[name]["shape"], dtype=np.int64))
    widest = max((p for p in PLANE_BITS if f"{tensor}/{p}" in weights.places), key=lambda p: PLANE_BITS[p], default="")
    return weights.places[name][1] * 8 // PLANE_BITS[plane] if plane and plane == widest else 0


def measure(engine, ids, peak: float | None) -> dict[str, object]:
    """Times the kernels of the first step of `engine.prefill(ids)`, at the engine's position, which stays.

    peak: bytes per second that shares are of. Returns function, tokens, depth, `kernels` (each a dict: kernel, calls,
    us of one call, share of the kernels' time, gbps, tops, peak_share; None where there is nothing to tell), and over
    all launches: launches, kernels_us, gaps_us, gap_us (the mean gap). UserError if the device cannot time kernels.
    """
    rounds = [engine.time(ids) for _ in range(ROUNDS)]
    name, tokens, steps = rounds[0]
    seconds = np.median([[step[1:] for step in timed] for _, _, timed in rounds], axis=0)  # [steps, (kernel, gap)]
    total, gaps = (float(s) for s in seconds.sum(axis=0))
    spent: dict[str, float] = defaultdict(float)  # a kernel's call may be several steps
    for (kernel, *_), (took, _) in zip(steps, seconds, strict=True):
        spent[kernel] += float(took)
    rows, function = [], engine.artifact.manifest["functions"][name]
    for kernel, took in sorted(spent.items(), key=lambda item: -item[1]):
        calls = [launch for launch in function["launches"] if launch["kernel"] == kernel]
        moved = sum(traffic(engine.artifact, call, tokens, engine.position) for call in calls) / took
        worked = sum(operations(engine.artifact, call, function) for call in calls) / took
        rows.append({
            "kernel": kernel,
            "calls": len(calls),
            "us": took / len(calls) * 1e6,
            "share": took / total,
            "gbps": moved / 1e9 or None,
            "tops": worked / 1e12 or None,
            "peak_share": moved / peak or None if peak else None,
        })  # fmt: skip
    all_gaps = {
        "launches": len(steps),
        "kernels_us": total * 1e6,
        "gaps_us": gaps * 1e6,
        "gap_us": gaps / max(len(steps) - 1, 1) * 1e6,
    }
    return {"function": name, "tokens": tokens, "depth": engine.position, "kernels": rows} | all_gaps


def text(found: dict, peak: str) -> str:
    """`measure`'s result as a table. peak: what the last column is a share of, such as "4800 GB/s (table)"; "" without
    one."""

    def number(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    header = ("kernel", "calls", "us a call", "share", "GB/s", "TOPS", *([f"of {peak}"] if peak else []))
    rows = [
        (
            row["kernel"],
            row["calls"],
            f"{row['us']:.2f}",
            f"{row['share']:.1%}",
            number(row["gbps"], ".1f"),
            number(row["tops"], ".2f"),
            *([number(row["peak_share"], ".0%")] if peak else []),
        )
        for row in found["kernels"]
    ]
    title = f"{found['function']}, {found['tokens']} tokens @ d{found['depth']}"
    sums = (
        f"{found['launches']} launches: kernels {found['kernels_us']:.1f} us, gaps between them {found['gaps_us']:.1f} "
        f"us"
    )
    total_time = f"{found['kernels_us'] + found['gaps_us']:.1f} us in total"
    return f"{title}\n{display.table(header, rows, range(1, 7))}{sums} ({found['gap_us']:.2f} us each), {total_time}\n"
