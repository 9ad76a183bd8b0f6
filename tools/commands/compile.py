"""`mlc-amd compile`: compiles a GGUF file to an artifact's folder."""

import time

from mlc_amd.runtime.artifact.artifact import Artifact
from mlc_amd.runtime.artifact.memory import CONTEXT_STEP, of_manifest
from mlc_amd.runtime.options import CompileOptions
from mlc_amd.tools.hub import models
from mlc_amd.tools.inspection import inspect_memory
from mlc_amd.tools.options import KeptWeights, Synthetic
from mlc_amd.tools.terminal import display

SHORT = {"o": "output"}
NOTES = 4  # limit of the unused tuned records that are reported


def run(
    model: str | None = None,
    *,
    output: str | None = None,
    synthetic: Synthetic = None,
    weights: KeptWeights = "file",
    options: CompileOptions,
) -> None:
    """Compiles a GGUF file into an artifact: a folder with kernels for one kind of machine and the repacked weights.

    The folder is complete or not there at all, and replaces an older artifact of the same name, but nothing else. It
    runs with `mlc-amd chat FOLDER`, also on other machines of the same kind.

    --arch is native (or auto) for this machine; for cpu x86-64-v2, x86-64-v3, x86-64-v4, znver4 or another LLVM CPU
    name; for rocm gfx1100, 7900xtx or another GPU; for vulkan a GPU such as 7900xtx, or one of the profiles vangogh
    (Steam Deck), rdna2, rdna3, rdna4, gfx90c, nvidia, lavapipe and generic (any device). Several GPUs are separated by
    commas.

    Args:
        model: GGUF file, any part of a split model, or OWNER/REPO:QUANT of huggingface.co.
        output: folder to write (default: dist/MODEL-TARGET-ARCH in the current directory).
    """
    start = time.perf_counter()
    summary = models.compile_artifact(model, output, options, synthetic, weights != "none")
    seconds = time.perf_counter() - start
    stages = ", ".join(f"{stage} {spent:.1f}" for stage, spent in summary.seconds.items())
    random = " (weights are random, made when it is loaded)" if weights == "none" else ""
    rows = [
        ("artifact", f"{summary.path}{random}"),
        ("kernels", f"{summary.kernels} ({display.size(summary.kernel_bytes)})"),
        ("plans", ", ".join(f"{count} {source}" for source, count in sorted(summary.tuned.items()))),
        ("launches", ", ".join(f"{function} {count}" for function, count in summary.launches.items())),
        ("time", f"{seconds:.1f} s ({stages})"),
    ]
    manifest = Artifact.open(summary.path).manifest
    if options.ctx not in (None, manifest["context"]):
        rounded = f"is rounded up to {manifest['context']}: caches hold a multiple of {CONTEXT_STEP}"
        display.message(f"--ctx {options.ctx} {rounded}")
    if (gpus := manifest["gpus"]) > 1:
        rows.append(("GPUs", f"{gpus}, which share it by tensor; memory is that of each"))
    rows += inspect_memory.lines(inspect_memory.plan(of_manifest(manifest), manifest["target"]["kind"], options.arch))
    for note in summary.notes[:NOTES]:
        display.message(note)
    if len(summary.notes) > NOTES:
        display.message(f"... and {len(summary.notes) - NOTES} more such records")
    for left, right in rows:
        print(f"{left:10}{right}")
