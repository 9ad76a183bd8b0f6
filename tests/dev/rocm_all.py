"""Compiles models for every known AMD GPU and reports time, spills and occupancy; not part of the test run, because it
takes an hour.

    python -m tests.dev.rocm_all MODEL.gguf|PRESET:FORMAT|PRESET:mixed .. [--archs gfx1100,gfx942]

`mixed` gives the matrices of a small preset all tensor types in turn.

Exits with 1 if a compile fails or a decode kernel uses scratch memory or spills.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from mlc_amd.compiler.codegen import hsaco
from mlc_amd.compiler.gguf import GGUFModel, synthetic
from mlc_amd.compiler.pipeline import compile_model
from mlc_amd.runtime.artifact.artifact import Artifact
from mlc_amd.runtime.options import CompileOptions
from mlc_amd.schedules.formats import FORMATS
from mlc_amd.schedules.gpu.base.arch import ARCHS


def decode_kernels(artifact: Artifact, arch: str) -> list:
    """The decode function's kernels, as the code object describes them."""
    manifest = artifact.manifest
    parsed = hsaco.parse((artifact.path / manifest["libraries"][arch]).read_bytes()).kernels
    called = {step["kernel"] for step in manifest["functions"]["decode"]["launches"]}
    return [parsed[step["symbol"]] for name in called for step in manifest["launches"][arch][name]["steps"]]


def open_model(source: str):
    preset, _, form = source.partition(":")
    if form != "mixed":
        return GGUFModel.open(source) if source.endswith(".gguf") else synthetic(source)
    model, forms = (
        synthetic(f"{preset}:q4_0"),
        sorted(FORMATS, key=lambda name: FORMATS[name].kind),
    )  # float formats first
    matrices = [name for name, tensor in model.tensors.items() if len(tensor.shape) == 2]
    for name, form in zip(
        sorted(matrices, key=lambda name: "ffn" in name), forms, strict=False
    ):  # gate and up want one kind
        model.tensors[name] = synthetic(f"{preset}:{form}").tensors[name]
    assert {tensor.format for tensor in model.tensors.values()} >= set(FORMATS), f"{preset} has too few matrices"
    return model


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("models", nargs="+")
    parser.add_argument("--archs", default=",".join(ARCHS))
    options = parser.parse_args()
    failed = 0
    for source in options.models:
        for arch in options.archs.split(","):
            start = time.perf_counter()
            with tempfile.TemporaryDirectory() as folder, open_model(source) as model:
                try:
                    compile_model(
                        model, Path(folder) / "model", CompileOptions(target="rocm", arch=arch, ctx=512), weights=False
                    )
                except Exception as error:  # reported, and counted: the other archs shall be tried
                    print(f"{source} {arch}: {type(error).__name__}: {error}", flush=True)
                    failed += 1
                    continue
                kernels = decode_kernels(Artifact.open(Path(folder) / "model"), arch)
            bad = [kernel.name for kernel in kernels if kernel.scratch or kernel.vgpr_spills or kernel.sgpr_spills]
            failed += bool(bad)
            waves = min(hsaco.occupancy(kernel, ARCHS[arch], kernel.threads)[0] for kernel in kernels)
            seconds = time.perf_counter() - start
            facts = f"{len(kernels)} decode kernels, at least {waves} waves a SIMD, spills: {bad or 'none'}"
            print(f"{source} {arch}: {seconds:.1f} s, {facts}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
