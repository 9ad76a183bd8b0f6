"""The shortest possible time of a kernel's call: its costs in an artifact's manifest (dist/README.md), divided by the
limits of runtime/gpus.py.

Bytes are those of weights and cache only, as activations may come from the GPU's caches. Operations are those of linear
layers, attention and recurrent layers, at the rate of the fastest unit that multiplies in the kernel's code. A kernel
without such costs has no bound.
"""

from collections.abc import Mapping
from typing import NamedTuple

from mlc_amd.runtime.gpus import Limits, limits_of, peak_bandwidth

MEMORY = "memory"


class Bound(NamedTuple):
    """The bound of a call. by: what determines it: MEMORY, or the Unit of runtime/gpus.py that multiplies."""

    seconds: float
    by: str


def traffic(kernel: Mapping, tokens: int, depth: float, single: int = 0) -> float:
    """Bytes of weights and cache that a call must move for `tokens` rows. `single` of these belong to sequences of
    their own; each sequence has `depth` tokens before. kernel: its entry in the manifest. The one row that a token
    needs of the embedding and of RoPE's table is not counted."""
    moved, sequences = kernel["bytes"], single + (tokens > single)
    return moved["call"] + moved["token"] * tokens + moved["key"] * sequences * min(depth, kernel["keys"])


def operations(kernel: Mapping, tokens: int, depth: int, single: int = 0) -> int:
    """Additions and multiplications of a call; arguments as for `traffic`. Linear layers compute all rows for which
    their kernel was made."""
    seen = single * min(depth + 1, kernel["keys"])
    seen += sum(min(depth + i + 1, kernel["keys"]) for i in range(tokens - single))
    return kernel["operations"]["call"] + kernel["operations"]["score"] * seen


def bound(moved: float, worked: float, unit: str | None, limits: Limits) -> Bound | None:
    """The bound of a call. moved: bytes. worked: operations. unit: see `unit_of`. None if nothing is known."""
    times = {MEMORY: moved / limits.bandwidth if limits.bandwidth else 0.0}
    if unit:
        times[unit] = worked / limits.rates[unit]
    by = max(times, key=lambda name: times[name])
    return Bound(times[by], by) if times[by] else None


def unit_of(manifest: Mapping, arch: str, kernel: str, limits: Limits) -> str | None:
    """The fastest unit that multiplies in a kernel's code, in any of its launches; None if unknown."""
    steps = manifest["launches"].get(arch, {}).get(kernel, {"steps": ()})["steps"]
    known = {unit for step in steps for unit in step.get("units", ())} & limits.rates.keys()
    return max(known, key=lambda unit: limits.rates[unit], default=None)


def of_artifact(manifest: Mapping, arch: str) -> dict:
    """{"arch", "bandwidth", "rates": see Limits, "kernels": [{"kernel", "rows", "single", "depth", "bytes",
    "operations", "unit", "bound_us", "bound_by"}]}, for calls with all rows, in the first state that the manifest lists
    for a kernel. Kernels without a bound are left out."""
    limits, rows = limits_of(arch), []
    for entry in manifest["kernels"]:
        if not entry["states"]:
            continue
        depth, tokens, single, _ = entry["states"][0]
        costs = traffic(entry, tokens, depth, single), operations(entry, tokens, depth, single)
        unit = unit_of(manifest, arch, entry["name"], limits)
        if found := bound(*costs, unit, limits):
            row = {"kernel": entry["name"], "rows": tokens, "single": single, "depth": depth, "bytes": costs[0]}
            row |= {"operations": costs[1], "unit": unit, "bound_us": found.seconds * 1e6, "bound_by": found.by}
            rows.append(row)
    return {"arch": arch, **limits._asdict(), "kernels": rows}


def words(limits: Mapping, source: str = "") -> str:
    """Limits as text. source: where the bandwidth comes from."""
    bandwidth, whose = limits["bandwidth"] / 1e9, f" ({source})" if source else ""
    rates = (f"{unit} {rate / 1e12:.1f}" for unit, rate in limits["rates"].items())
    at = f"{bandwidth:.4g} GB/s{whose}" if bandwidth else "bandwidth not known"
    return f"{at}; TOPS: {', '.join(rates) or 'not known'}"


def code_arch(device, manifest: Mapping) -> str:
    """The arch of the code that an opened device runs."""
    return getattr(device, "code_arch", "") or manifest["target"]["arch"]


def limits_on(device, manifest: Mapping, measured: float | None) -> Limits:
    """The limits of an opened device. measured: bytes per second; used if its product is unknown."""
    found = limits_of(code_arch(device, manifest), device.name)
    return found if peak_bandwidth(device.name) or not measured else found._replace(bandwidth=measured)
