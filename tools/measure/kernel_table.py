"""The time of one step by kernel, for `mlc-amd bench --per-kernel`, and the memory traffic of launches.

In: an engine whose device can time kernels. Out: a table as data for JSON output (`measure`), and as text (`text`).
Bytes, operations and shortest possible times come from bounds.py.
"""

from collections import defaultdict
from typing import Any

import numpy as np

from mlc_amd.runtime.gpus import Limits
from mlc_amd.tools.measure.bounds import bound, code_arch, operations, traffic, unit_of, words
from mlc_amd.tools.terminal import display

ROUNDS = 7


def decode_bytes(artifact, depth: float) -> float:
    """Bytes that decoding one token reads if the cache has `depth` tokens before it: weights, keys and values."""
    costs = {entry["name"]: entry for entry in artifact.manifest["kernels"]}
    launches = artifact.manifest["functions"]["decode"]["launches"]
    return sum(traffic(costs[launch["kernel"]], 1, depth) for launch in launches)


def measure(engine, ids, limits: Limits, rounds: int = ROUNDS) -> dict[str, Any]:
    """Times the kernels of the first step of `engine.prefill(ids)` at the engine's position, which does not change.
    limits: of the device. rounds: number of timings; each launch gets its median. Returns function, tokens, depth,
    `limits`, `kernels` (for each: kernel, calls, us of one call, share of the kernels' time, gbps, tops, bound_us,
    bound_by, and bound_share, the bound as a share of the time; None where unknown), and over all launches: launches,
    kernels_us, gaps_us, gap_us (the mean gap). Raises UserError if the device cannot time kernels."""
    found = [engine.time(ids) for _ in range(rounds)]
    name, tokens, steps = found[0]
    seconds = np.median([[step[1:] for step in timed] for _, _, timed in found], axis=0)  # [steps, (kernel, gap)]
    total, gaps = (float(s) for s in seconds.sum(axis=0))
    spent: dict[str, float] = defaultdict(float)  # a call of a kernel may be several steps
    for (kernel, *_), (took, _) in zip(steps, seconds, strict=True):
        spent[kernel] += float(took)
    manifest, rows = engine.artifact.manifest, []
    arch, costs = code_arch(engine.device, manifest), {entry["name"]: entry for entry in manifest["kernels"]}
    for kernel, took in sorted(spent.items(), key=lambda item: -item[1]):
        calls = costs[kernel]["calls"][name]
        call = took / calls
        moved, worked = (of(costs[kernel], tokens, engine.position) for of in (traffic, operations))
        least = bound(moved, worked, unit_of(manifest, arch, kernel, limits), limits)
        rows.append({
            "kernel": kernel,
            "calls": calls,
            "us": call * 1e6,
            "share": took / total,
            "gbps": moved / call / 1e9 or None,
            "tops": worked / call / 1e12 or None,
            "bound_us": least and least.seconds * 1e6,
            "bound_by": least and least.by,
            "bound_share": least and least.seconds / call,
        })  # fmt: skip
    all_gaps = {"launches": len(steps), "kernels_us": total * 1e6, "gaps_us": gaps * 1e6}
    all_gaps |= {"gap_us": gaps / max(len(steps) - 1, 1) * 1e6}
    facts = {"function": name, "tokens": tokens, "depth": engine.position, "limits": limits._asdict()}
    return facts | {"kernels": rows} | all_gaps


def text(found: dict, source: str) -> str:
    """The result of `measure` as a table. source: where the bandwidth of bounds comes from, such as "H200" or
    "copy"."""

    def number(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    header = ("kernel", "calls", "us a call", "share", "GB/s", "TOPS", "bound us", "of bound", "by")
    rows = []
    for row in found["kernels"]:
        forms = {"gbps": ".1f", "tops": ".2f", "bound_us": ".2f", "bound_share": ".0%"}
        speed = (number(row[key], form) for key, form in forms.items())
        cells = row["kernel"], row["calls"], f"{row['us']:.2f}", f"{row['share']:.1%}", *speed, row["bound_by"] or ""
        rows.append(cells)
    title = f"{found['function']}, {found['tokens']} tokens @ d{found['depth']}"
    kernels, gaps = found["kernels_us"], found["gaps_us"]
    sums = f"{found['launches']} launches: kernels {kernels:.1f} us, gaps between them {gaps:.1f} us"
    sums += f" ({found['gap_us']:.2f} us each), {kernels + gaps:.1f} us in total"
    at = words(found["limits"], source)
    return f"{title}\n{display.table(header, rows, range(1, 8))}{sums}\nbounds: at {at}\n"
