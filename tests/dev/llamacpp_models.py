"""Each GGUF file of a folder, float32 and tiny, on the CPU against llama.cpp: a table of differences and refusals.

    python -m tests.dev.llamacpp_models FOLDER LLAMA_LOGITS [NAME...]
    python -m tests.dev.llamacpp_models FOLDER LLAMA_LOGITS --quantize LLAMA_QUANTIZE TYPE [NAME...]

FOLDER: such as llama.cpp's own test models of its architectures (test-llama-archs). LLAMA_LOGITS: a program that takes
MODEL OUT TOKEN.. and writes the logits of all tokens, float32. A line has the normalized mean squared error (mse
between both divided by the mean square of llama.cpp's), or why a file is refused. Logits of llama.cpp are kept in
FOLDER.

With --quantize each file is quantized by llama.cpp first, to a TYPE such as Q8_0: a line has the mean Kullback-Leibler
divergence from the float32 file's probabilities, and llama.cpp's own, of which it may be KL_OF_LLAMACPP times.
"""

import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from mlc_amd.compiler.codegen.cpu import CpuTarget
from mlc_amd.compiler.functions import FunctionSpec
from mlc_amd.compiler.gguf import GGUFModel
from mlc_amd.compiler.pipeline import compile_model
from mlc_amd.runtime.engine.engine import Engine
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.options import CompileOptions
from tests.dev.quality import KL_OF_LLAMACPP, kl_divergence
from tests.support.llvm_levels import unoptimized

TOKENS = 48
GOOD = 1e-4  # of the normalized mean squared error
IDS = np.random.default_rng(0).integers(0, 128, TOKENS)
LEAST_KL = 1e-5  # nats, below which differences do not count
STEPS = 4  # tokens at the end that are decoded one by one


def few(self: CpuTarget, ctx: int) -> list[FunctionSpec]:
    """One row, a chunk, and the logits of all of its rows."""
    return [FunctionSpec("decode", 1, 1, "all"), FunctionSpec("prefill_64", 64, 0, "last"),
            FunctionSpec("score_64", 64, 0, "all")]  # fmt: skip


def theirs(path: Path, program: str, ids: np.ndarray) -> np.ndarray:
    """llama.cpp's logits [tokens, vocab], computed once."""
    kept = path.with_suffix(".f32")
    if not kept.exists() or kept.stat().st_mtime < path.stat().st_mtime:
        command = ["nice", program, str(path), str(kept), *map(str, ids)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode or not kept.exists():
            kept.unlink(missing_ok=True)
            lines = done.stderr.strip().splitlines()
            raise UserError(f"llama.cpp: {lines[-1] if lines else done.returncode}")
    return np.fromfile(kept, np.float32).reshape(len(ids), -1)


def ours(path: Path, ids: np.ndarray) -> np.ndarray:
    """Logits [tokens, vocab] of this compiler; the last tokens come one by one."""
    with tempfile.TemporaryDirectory() as folder, unoptimized():
        with GGUFModel.open(path) as model:
            compile_model(model, Path(folder) / "model", CompileOptions(target="cpu", ctx=128, tuned="none"))
        with Engine.load(Path(folder) / "model") as engine:
            first = engine.score(ids[:-STEPS])
            return np.concatenate([first, *(engine.decode(int(token))[None] for token in ids[-STEPS:])])


def exact(path: Path, program: str) -> str:
    """The cell of the table: of a float32 file."""
    expected, found = theirs(path, program, IDS), ours(path, IDS)
    if expected.shape != found.shape:
        return f"BAD {found.shape} logits, expected {expected.shape}"
    error = float(np.mean((expected - found) ** 2) / np.mean(expected**2))
    return f"{'good' if error <= GOOD else 'BAD '} {error:.1e}"


def quantized(path: Path, program: str, quantizer: str, form: str) -> str:
    """The same of the file in another format."""
    with tempfile.TemporaryDirectory() as folder:
        small = Path(folder) / path.name
        done = subprocess.run(["nice", quantizer, str(path), str(small), form, "1"], capture_output=True, check=False)
        if done.returncode:
            raise UserError(f"llama.cpp does not quantize it: {done.returncode}")
        expected, of_theirs, found = theirs(path, program, IDS), theirs(small, program, IDS), ours(small, IDS)
    mine, bar = kl_divergence(expected, found), kl_divergence(expected, of_theirs)
    return f"{'good' if mine <= max(KL_OF_LLAMACPP * bar, LEAST_KL) else 'BAD '} {mine:.1e} / {bar:.1e}"


def cell_of(make: Callable[[], str], path: Path) -> str:
    """The cell of the table, or why there is none."""
    try:
        return make()
    except UserError as error:
        return str(error).removeprefix(f"{path}: ")
    except Exception as error:
        trace = traceback.extract_tb(error.__traceback__)[-1]
        message = " ".join(str(error).split())[:120]
        return f"FAILED {type(error).__name__}: {message} ({Path(trace.filename).name}:{trace.lineno})"


def main() -> None:
    folder, program, *names = sys.argv[1:]
    CpuTarget.functions = few  # type: ignore[method-assign]
    check = partial(exact, program=program)
    if names[:1] == ["--quantize"]:
        _, quantizer, form, *names = names
        check = partial(quantized, program=program, quantizer=quantizer, form=form)
    counts: dict[str, int] = {}
    for path in sorted(Path(folder).glob("*.gguf")):
        if names and path.stem not in names and path.stem.rpartition("-")[0] not in names:
            continue
        start = time.process_time()
        cell = cell_of(partial(check, path), path)
        kind = cell.split()[0] if cell.split()[0] in ("good", "BAD", "FAILED") else "refused"
        counts[kind] = counts.get(kind, 0) + 1
        print(f"{path.stem:24} {cell}  [{time.process_time() - start:.1f} s]", flush=True)
    print(counts)


if __name__ == "__main__":
    main()
