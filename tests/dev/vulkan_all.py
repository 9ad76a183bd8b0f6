"""Compiles models for every known Vulkan profile, validates the SPIR-V, and has RADV compile it for AMD's GPUs; not
part of the test run, because it takes long.

    python -m tests.dev.vulkan_all MODEL.gguf|PRESET:FORMAT|PRESET:mixed .. [--archs vangogh,rdna3:matrix=none]
        [--table]

`mixed` gives the matrices of a small preset all tensor types in turn; `each` in place of a format is a model for every
tensor type. --table: the statistics of every kernel.

Exits with 1 if a compile fails, a module is invalid, or a kernel uses scratch memory or spills. Not counted: what is
missing here (spirv-val that knows cooperative matrices, RADV that knows the GPU); that is told.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from mlc_amd.compiler.codegen import radv, spirv_reader
from mlc_amd.compiler.pipeline import compile_model
from mlc_amd.runtime.artifact.artifact import Artifact
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.options import CompileOptions
from mlc_amd.schedules.formats import FORMATS
from mlc_amd.schedules.gpu.base import profiles
from mlc_amd.tools.inspection import inspect_vulkan
from tests.dev.rocm_all import open_model

NOT_KNOWN = ("Invalid capability", "no spirv-val")  # complaints of a spirv-val that is too old, or missing


def invalid(code) -> tuple[list[str], list[str]]:
    """Complaints about invalid modules, and about those that could not be judged."""
    found, unknown = [], []
    for name, shader in code.shaders.items():
        try:
            spirv_reader.validate(shader.code)
        except UserError as error:
            (unknown if any(text in str(error) for text in NOT_KNOWN) else found).append(f"{name}: {error}")
    return found, unknown


def judge(artifact: Artifact, arch: str, table: bool) -> tuple[bool, str]:
    """(whether all is well, what was found) for the only profile of an artifact."""
    (code,) = inspect_vulkan.of_artifact(artifact)
    complaints, unknown = invalid(code)
    report = code.describe()
    facts = [f"{len(code.shaders)} modules", f"invalid: {complaints or 'none'}"]
    if unknown:
        facts.append(f"{len(unknown)} not validated ({unknown[0]})")
    bad = []
    if code.report:
        if table:
            print(inspect_vulkan.tables([report]))
        kernels = [kernel for kernel in report["kernels"] if "vgprs" in kernel]
        bad = [
            kernel["name"] for kernel in kernels if kernel["scratch"] or kernel["vgpr_spills"] or kernel["sgpr_spills"]
        ]
        least = min(kernels, key=lambda kernel: kernel["occupancy"]["waves"])
        waves = f"{least['occupancy']['waves']} waves a SIMD ({least['name']}: {least['occupancy']['limit']})"
        facts.append(f"{report['compiler']}: at least {waves}, scratch or spills: {bad or 'none'}")
    if code.missing and radv.gpu_of(profiles.resolve(arch)):
        facts.append(f"not compiled: {code.missing}")
    return not (complaints or bad), ", ".join(facts)


def spread(models: list[str]) -> list[str]:
    """The models, with PRESET:each as one for every tensor type."""
    found = []
    for model in models:
        preset, _, form = model.partition(":")
        found += [f"{preset}:{name}" for name in FORMATS] if form == "each" else [model]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("models", nargs="+")
    parser.add_argument("--archs", default=",".join(profiles.PROFILES))
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    failed = 0
    for source in spread(options.models):
        for arch in options.archs.split(","):
            start = time.perf_counter()
            with tempfile.TemporaryDirectory() as folder, open_model(source) as model:
                try:
                    compile_model(
                        model,
                        Path(folder) / "model",
                        CompileOptions(target="vulkan", arch=arch, ctx=512),
                        weights=False,
                    )
                    good, facts = judge(Artifact.open(Path(folder) / "model"), arch, options.table)
                except Exception as error:  # reported, and counted: the other archs shall be tried
                    good, facts = False, f"{type(error).__name__}: {error}"
            failed += not good
            print(f"{source} {arch}: {time.perf_counter() - start:.1f} s, {facts}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
