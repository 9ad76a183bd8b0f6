"""Fuzzes a whole model: a damaged GGUF file is compiled for this CPU, loaded, and reads and writes some tokens.

In: small models with layers of all kinds (`base_models.py`), whose metadata, tensors or weights are damaged. Out: the
table of `fuzzing.py`.
"""

import random
import struct
import sys
from functools import cache

from mlc_amd.compiler.pipeline import compile_model
from mlc_amd.runtime.artifact.artifact import Artifact
from mlc_amd.runtime.options import CompileOptions
from mlc_amd.runtime.text import chat_template
from tests.dev import base_models
from tests.dev.fuzz import artifacts, fuzzing
from tests.dev.fuzz.fuzzing import Case, Limits
from tests.dev.fuzz.gguf import InProcess
from tests.dev.fuzz.gguf_mutations import Parts, joined, mutated, opened, parts_of

# LLVM takes more than a reader, also of time where the machine is busy.
LIMITS = Limits(seconds=300, memory=4 << 30)
# Bit patterns of weights and scales: infinities, NaN, zeros, large and tiny numbers, in float32 and float16.
_PATTERNS = (b"\xff", b"\x00", b"\x00\x7c", b"\x00\xfc", b"\x00\x7e", b"\xff\x7b", b"\x01\x00", struct.pack("<f", 1e38),
             struct.pack("<f", float("inf")), struct.pack("<f", float("nan")))  # fmt: skip


@cache
def bases() -> dict[str, Parts]:
    """Undamaged models by name."""
    return {name: parts_of(base_models.model(name)) for name in base_models.MODELS}


def outcome(data: bytes) -> list[int]:
    """Compiles the model and generates tokens: greedily, and by its own sampling parameters; of an encoder the sizes of
    its results."""
    with opened(data) as (model, folder):
        compile_model(model, folder / "out", CompileOptions(target="cpu"))
        artifact = Artifact.open(folder / "out")
        if artifact.manifest["model"]["encoder"]:
            return [rows.shape[1] for rows in artifacts.encoded(artifact)]
        with artifacts.engine(artifact) as engine:
            prompt = [i % engine.vocab for i in range(20)]
            logits = [engine.prefill(prompt), engine.decode(1)]
            assert all(one.shape == (engine.vocab,) for one in logits)
            made = [piece.id for piece in engine.generate(prompt, max_tokens=4, temperature=0)]
            made += [piece.id for piece in engine.generate(prompt, max_tokens=4)]
            assert all(0 <= i < engine.vocab for i in made)
            return made


def damaged_weights(draw: random.Random, file: Parts) -> tuple[str, str, bytes]:
    """Damaged weights."""
    file, made, what = file.copy(), bytearray(file.data), []
    for _ in range(draw.randint(1, 4)):
        name, _, _, offset = draw.choice(file.tensors)
        pattern, count = draw.choice((*_PATTERNS, draw.randbytes(64))), draw.choice((2, 64, 1000, 5000))
        end = min(offset + count, len(made))
        made[offset:end] = (pattern * count)[: end - offset]
        what.append(f"{name.decode()} {pattern[:4].hex()} x {count}")
    file.data = bytes(made)
    return "weights", ", ".join(what), joined(file)


def make(draw: random.Random) -> Case:
    name = draw.choice(list(bases()))
    kind, what, data = (damaged_weights if draw.random() < 0.5 else mutated)(draw, bases()[name])

    def act() -> None:
        outcome(data)

    return Case(kind, f"{name}: {what}", act)


def control() -> Case:
    return Case("control", "", lambda: all(len(outcome(joined(base))) in (2, 8) for base in bases().values()))


def main(argv: list[str] | None = None) -> int:
    chat_template.LimitedProcess = InProcess  # pyright: ignore[reportAttributeAccessIssue, reportPrivateImportUsage]
    bases()
    return fuzzing.main(__doc__, make, control, LIMITS, argv)


if __name__ == "__main__":
    sys.exit(main())
