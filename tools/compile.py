"""`mlc-amd compile`: a GGUF file in, an artifact's folder out."""

import time
from typing import Literal

from mlc_amd.tools import display, models

SHORT = {"o": "output"}
NOTES = 4  # of tuned records that were left aside, how many are told


def run(
    model: str | None = None,
    *,
    target: str = "cpu",
    arch: str = "native",
    ctx: int | None = None,
    output: str | None = None,
    synthetic: str | None = None,
    weights: Literal["file", "none"] = "file",
    tuned: Literal["none", "shipped", "user", "auto"] = "auto",
) -> None:
    """Compiles a GGUF file into an artifact: a folder with kernels for one kind of machine and the repacked weights.

    The folder is complete or not there at all, and replaces an older artifact of the same name, but nothing else. It
    runs with `mlc-amd chat FOLDER`, also on other machines of the same kind.

    Args:
        model: the GGUF file; of a split model any part. target: what to compile for: cpu, rocm or vulkan. arch: native
        (or auto) for this machine's; for cpu x86-64-v2, x86-64-v3, x86-64-v4, znver4 or another cpu name of LLVM; for
        rocm
            gfx1100, 7900xtx or another name; for vulkan a product's name as 7900xtx, or a profile of vangogh (Steam
            Deck), rdna2, rdna3, rdna4, gfx90c, nvidia, lavapipe and generic (any device). For GPUs several go with
            commas between.
        ctx: tokens that the KV cache holds (default: as many as the model allows, up to 4096). output: the folder to
        write (default: dist/MODEL-TARGET-ARCH here). synthetic: instead of a file, a model of that shape with random
        weights, for benchmarks: PRESET:FORMAT as llama3-8b:q4_0 weights: none leaves the weights out: the artifact is
        small, and runs with random ones, for benchmarks on another machine. tuned: whose tuned plans the kernels are
        built with: those that `mlc-amd tune` found here (user), that come with mlc-amd (shipped),
            the first where there are both (auto), or neither's (none).
    """
    start = time.perf_counter()
    summary = models.compile_artifact(
        model,
        output,
        synthetic=synthetic,
        target=target,
        arch=arch,
        ctx=ctx,
        weights=weights != "none",
        tuned=tuned,
    )
    seconds = time.perf_counter() - start
    stages = ", ".join(f"{stage} {spent:.1f}" for stage, spent in summary.seconds.items())
    rows = [
        ("artifact", summary.path),
        (
            "weights",
            display.size(summary.weight_bytes) + (" (random, made when it is loaded)" if weights == "none" else ""),
        ),
        ("kernels", f"{summary.kernels} ({display.size(summary.kernel_bytes)})"),
        ("plans", ", ".join(f"{count} {source}" for source, count in sorted(summary.tuned.items()))),
        ("launches", ", ".join(f"{function} {count}" for function, count in summary.launches.items())),
        ("KV cache", display.size(summary.kv_bytes)),
        ("buffers", display.size(summary.arena_bytes)),
        ("time", f"{seconds:.1f} s ({stages})"),
    ]
    for note in summary.notes[:NOTES]:
        display.message(note)
    if len(summary.notes) > NOTES:
        display.message(f"... and {len(summary.notes) - NOTES} more such records")
    for left, right in rows:
        print(f"{left:10}{right}")
