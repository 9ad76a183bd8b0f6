"""Shows the shortest possible times of an artifact's kernels (tools/measure/bounds.py) as text, for `mlc-amd
inspect`."""

from mlc_amd.tools.measure.bounds import words
from mlc_amd.tools.terminal import display

HEADER = ("us", "by", "MB", "GFLOP", "unit", "rows", "after", "kernel")
LEGEND = """us: what a call takes at least, with all of its rows, each sequence after so many tokens: the larger of the
times for bytes of weights and cache, and for operations by the fastest unit that multiplies in its code. They
come from the model's shapes, not from the counts above. Kernels that have neither are left out."""


def tables(found: list[dict]) -> str:
    """The tables. found: `bounds.of_artifact` for each arch."""
    parts = []
    for arch in found:
        rows = [
            (
                f"{row['bound_us']:.3f}", row["bound_by"], f"{row['bytes'] / 1e6:.3f}",
                f"{row['operations'] / 1e9:.3f}", row["unit"] or "", row["rows"], row["depth"] or "", row["kernel"],
            )
            for row in arch["kernels"]
        ]  # fmt: skip
        title = f"bounds for {arch['arch']}: {words(arch)}"
        parts.append(f"{title}\n{display.table(HEADER, rows, (0, 2, 3, 5, 6))}")
    return "\n".join([*parts, LEGEND])
