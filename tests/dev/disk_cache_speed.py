"""The speed of the cache on disk: python -m tests.dev.disk_cache_speed llama3-8b:q4_0 --tokens 100000 --kv-type q8_0.

In: a synthetic model, or an artifact. A prompt is computed with a disk, and answered; then, by an engine that is loaded
anew, once more: the seconds until its first token, and whether all tokens and their probabilities are the same, bit by
bit. Then an answer is generated, alternately by an engine with a disk, right after a prompt whose pages are still to be
written, and by one without: tokens per second of each, and their ratio.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from mlc_amd.runtime.engine.engine import Engine
from mlc_amd.runtime.options import LoadOptions, RunOptions
from mlc_amd.tools.hub import models

ANSWER = 32


def answer(engine: Engine, prompt: list[int], count: int) -> tuple[float, float, list[tuple[int, float | None]]]:
    """Seconds until the first token; seconds from there to the last one; tokens with their probabilities."""
    begun, first, found = time.perf_counter(), 0.0, []
    for piece in engine.generate(prompt, max_tokens=count, temperature=0.0, logprobs=0):
        first = first or time.perf_counter()
        found.append((piece.id, piece.logprob))
    return first - begun, time.perf_counter() - first, found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", help="a synthetic model's spec, or an artifact's folder")
    parser.add_argument("--tokens", type=int, default=8000, help="of the prompt")
    parser.add_argument("--kv-type", choices=("f16", "q8_0"), default="f16")
    parser.add_argument("--target", default="auto")
    parser.add_argument("--rounds", type=int, default=10, help="answers with a disk, and as many without")
    parser.add_argument("--decode", type=int, default=64, help="tokens of these answers")
    given = parser.parse_args()
    path = Path(given.model)
    if not path.is_dir():
        context = -(-(given.tokens + 2 * ANSWER) // 64) * 64
        options = LoadOptions(target=given.target, ctx=context, kv_type=given.kv_type)
        path = models.artifact_path(options, given.model)
    draw = np.random.default_rng(1)

    def prompt(count: int) -> list[int]:
        return draw.integers(0, 900, count).tolist()

    def load(disk: str | None) -> Engine:
        return Engine.load(path, RunOptions(cache_disk=disk))

    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        long = prompt(given.tokens)
        with load("200G") as engine:
            computed, _, expected = answer(engine, long, ANSWER)
            begun = time.perf_counter()
        written = time.perf_counter() - begun
        nbytes = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
        with load("200G") as engine:
            again, _, found = answer(engine, long, ANSWER)
            cached = engine.last.cached_tokens
        print(
            f"{given.tokens} tokens, {nbytes / 1e6:.0f} MB: first token after {computed:.2f} s, after a restart "
            f"{again:.2f} s with {cached} tokens of the cache ({nbytes / 1e6 / again:.0f} MB/s); closing took "
            f"{written:.2f} s; answers {'equal, bit by bit' if found == expected else 'DIFFER'}"
        )
        speeds: dict[bool, list[float]] = {True: [], False: []}
        pages = min(given.tokens, 2048)
        with load("200G") as with_disk, load(None) as without:
            for number in range(2 * given.rounds):
                engine, short = (with_disk, without)[number % 2], prompt(100)
                answer(engine, short, 2)
                answer(engine, prompt(pages), 1)  # its pages are to be written
                speeds[number % 2 == 0].append(given.decode / answer(engine, short, given.decode)[1])
        with_disk_speed, without_speed = (statistics.median(speeds[which]) for which in (True, False))
        print(
            f"decode while pages are written {with_disk_speed:.1f} tokens/s, without a disk {without_speed:.1f}: "
            f"{with_disk_speed / without_speed:.3f}"
        )
        return int(found != expected)


if __name__ == "__main__":
    sys.exit(main())
