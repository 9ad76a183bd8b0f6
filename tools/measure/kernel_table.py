"""The time of one step by kernel, which `mlc-amd bench --per-kernel` shows, and the memory traffic of launches.

In: an engine whose device can time kernels. Out: a table as data (`measure`), which JSON output holds, and as text
(`text`).

Bytes are those of weights and cache only, a lower bound; activations are not counted. Operations are those of linear
layers and attention. The manifest has both for each kernel (dist/README.md).
"""

from collections import defaultdict
from typing import Any

import numpy as np

from mlc_amd.tools.terminal import display

ROUNDS = 7


def decode_bytes(artifact, depth: float) -> float:
    """Bytes that decoding one token reads when the cache holds `depth` tokens before it: weights, keys and values."""
    costs = {entry["name"]: entry for entry in artifact.manifest["kernels"]}
    launches = artifact.manifest["functions"]["decode"]["launches"]
    return sum(traffic(costs[launch["kernel"]], 1, depth) for launch in launches)


def traffic(kernel: dict, tokens: int, depth: float) -> float:
    """Bytes of weights and cache that a call must move for `tokens` tokens after `depth` others. kernel: its entry in
    the manifest. Of the embedding and RoPE's table a token needs one row, which does not count."""
    moved = kernel["bytes"]
    return moved["call"] + moved["token"] * tokens + moved["key"] * min(depth, kernel["keys"])


def operations(kernel: dict, tokens: int, depth: int) -> int:
    """Additions and multiplications of a call, likewise. Linear layers compute all rows that their kernel is made
    for."""
    seen = sum(min(depth + i + 1, kernel["keys"]) for i in range(tokens))
    return kernel["operations"]["call"] + kernel["operations"]["score"] * seen


def measure(engine, ids, peak: float | None, rounds: int = ROUNDS) -> dict[str, Any]:
    """Times the kernels of the first step of `engine.prefill(ids)`, at the engine's position, which stays. peak: bytes
    per second that shares are of. rounds: timings of the step, of which each launch takes its median. Returns function,
    tokens, depth, `kernels` (each a dict: kernel, calls, us of one call, share of the kernels' time, gbps, tops,
    peak_share; None where there is nothing to tell), and over all launches: launches, kernels_us, gaps_us, gap_us (the
    mean gap). UserError if the device cannot time kernels."""
    found = [engine.time(ids) for _ in range(rounds)]
    name, tokens, steps = found[0]
    seconds = np.median([[step[1:] for step in timed] for _, _, timed in found], axis=0)  # [steps, (kernel, gap)]
    total, gaps = (float(s) for s in seconds.sum(axis=0))
    spent: dict[str, float] = defaultdict(float)  # a kernel's call may be several steps
    for (kernel, *_), (took, _) in zip(steps, seconds, strict=True):
        spent[kernel] += float(took)
    rows, costs = [], {entry["name"]: entry for entry in engine.artifact.manifest["kernels"]}
    for kernel, took in sorted(spent.items(), key=lambda item: -item[1]):
        calls = costs[kernel]["calls"][name]
        moved = calls * traffic(costs[kernel], tokens, engine.position) / took
        worked = calls * operations(costs[kernel], tokens, engine.position) / took
        rows.append({
            "kernel": kernel,
            "calls": calls,
            "us": took / calls * 1e6,
            "share": took / total,
            "gbps": moved / 1e9 or None,
            "tops": worked / 1e12 or None,
            "peak_share": moved / peak or None if peak else None,
        })  # fmt: skip
    all_gaps = {"launches": len(steps), "kernels_us": total * 1e6, "gaps_us": gaps * 1e6}
    all_gaps |= {"gap_us": gaps / max(len(steps) - 1, 1) * 1e6}
    return {"function": name, "tokens": tokens, "depth": engine.position, "kernels": rows} | all_gaps


def text(found: dict, peak: str) -> str:
    """`measure`'s result as a table. peak: what the last column is a share of, such as "4800 GB/s (H200)"; "" without
    one."""

    def number(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    header = ("kernel", "calls", "us a call", "share", "GB/s", "TOPS", *([f"of {peak}"] if peak else []))
    rows = []
    for row in found["kernels"]:
        speed = number(row["gbps"], ".1f"), number(row["tops"], ".2f"), number(row["peak_share"], ".0%")
        cells = (row["kernel"], row["calls"], f"{row['us']:.2f}", f"{row['share']:.1%}", *speed)
        rows.append(cells[: len(header)])
    title = f"{found['function']}, {found['tokens']} tokens @ d{found['depth']}"
    kernels, gaps = found["kernels_us"], found["gaps_us"]
    sums = f"{found['launches']} launches: kernels {kernels:.1f} us, gaps between them {gaps:.1f} us"
    sums += f" ({found['gap_us']:.2f} us each), {kernels + gaps:.1f} us in total"
    return f"{title}\n{display.table(header, rows, range(1, 7))}{sums}\n"
