"""Runs the reference models on this machine's Vulkan device and reports their quality; not part of the test run, which
takes a sample.

    python -m tests.dev.vulkan_quality [MODEL ..] [--arch auto] [--shared ../shared]

Exits with 1 if a model misses the bar of `quality.py`.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from mlc_amd.compiler.gguf import GGUFModel
from mlc_amd.compiler.pipeline import compile_model
from mlc_amd.runtime.engine.engine import Engine
from mlc_amd.runtime.options import CompileOptions
from tests.dev.quality import MODELS, Reference


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--arch", default="auto")
    parser.add_argument("--shared", type=Path, default=Path(__file__).resolve().parents[3] / "shared")
    parser.add_argument("--tokens", type=int, help="of each greedy text")
    options = parser.parse_args()
    failed = 0
    for name in options.models:
        start = time.perf_counter()
        with (
            tempfile.TemporaryDirectory() as folder,
            GGUFModel.open(options.shared / "models" / f"{name}.gguf") as model,
        ):
            compile_model(model, Path(folder) / "model", CompileOptions(target="vulkan", arch=options.arch, ctx=512))
            engine, expected = Engine.load(Path(folder) / "model"), Reference(options.shared, name)
            compiled = time.perf_counter() - start
            logits, (compared, wrong) = expected.logits(engine), expected.greedy(engine, options.tokens)
            device = engine.device.name
            engine.device.close()
        failed += wrong > 0 or not logits.good
        facts = (
            f"KL {logits.kl:.5f} (bar {logits.kl_bar:.5f}), perplexity {logits.perplexity:+.2%}, greedy {wrong} of "
            f"{compared} wrong"
        )
        print(
            f"{name} on {device}: {facts}; {compiled:.0f} s to load, {time.perf_counter() - start:.0f} s in all",
            flush=True,
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
