"""Fuzzes the file of an image encoder: a damaged mmproj file is compiled with a decoder for this CPU, and a picture is
prepared, encoded and continued; with --open it is read only.

In: small encoders (`vision_models.py`), whose metadata, tensors or weights are damaged. Out: the table of `fuzzing.py`.
"""

import io
import random
import sys
import tempfile
from collections.abc import Callable
from contextlib import closing
from functools import cache, partial
from pathlib import Path

from mlc_amd.compiler.gguf import synthetic
from mlc_amd.compiler.gguf.mmproj import VisionFile
from mlc_amd.compiler.pipeline import compile_model
from mlc_amd.runtime.artifact.artifact import Artifact
from mlc_amd.runtime.options import CompileOptions
from mlc_amd.runtime.text import chat_template
from tests.dev.base_models import SIZES
from tests.dev.fuzz import artifacts, fuzzing
from tests.dev.fuzz.compile import LIMITS, damaged_weights
from tests.dev.fuzz.fuzzing import Case
from tests.dev.fuzz.gguf import InProcess
from tests.dev.fuzz.gguf_mutations import SCRATCH, Parts, joined, mutated, parts
from tests.support import image_cases, vision_models


@cache
def bases() -> dict[str, Parts]:
    """Undamaged encoders by projector."""
    found = {}
    with tempfile.TemporaryDirectory(dir=SCRATCH) as folder:
        for projector in vision_models.ENCODERS:
            path = Path(folder) / "mmproj.gguf"
            vision_models.write(path, projector)
            found[projector] = parts(path.read_bytes())
    return found


@cache
def picture() -> bytes:
    file = io.BytesIO()
    image_cases.picture(50, 30).save(file, "PNG")
    return file.getvalue()


def read(data: bytes) -> list[int]:
    """The sizes of its tensors, which are read."""
    with tempfile.TemporaryDirectory(dir=SCRATCH, prefix="fuzz-") as folder:
        path = Path(folder) / "mmproj.gguf"
        path.write_bytes(data)
        with closing(VisionFile(path)) as file:
            return [tensor.dequantize().size for tensor in file.tensors.values()]


def outcome(data: bytes) -> list[int]:
    """Compiles the encoder with a decoder; tokens that follow a picture."""
    with tempfile.TemporaryDirectory(dir=SCRATCH, prefix="fuzz-") as folder:
        path = Path(folder) / "mmproj.gguf"
        path.write_bytes(data)
        with synthetic("tiny-qwen2:f16", keys=SIZES | vision_models.DECODER) as model:
            model.add_vision(VisionFile(path))
            out = Path(folder) / "out"
            compile_model(model, out, CompileOptions(target="cpu", ctx=128, tuned="none"))
        with artifacts.engine(Artifact.open(out)) as engine:
            prompt = engine.images.prompt("<image> a", [picture()])
            made = [piece.id for piece in engine.generate(prompt, max_tokens=4, temperature=0)]
            assert all(0 <= i < engine.vocab for i in made)
            return made


def make(what_of: Callable[[bytes], list[int]], draw: random.Random) -> Case:
    name = draw.choice(list(bases()))
    kind, what, data = (damaged_weights if draw.random() < 0.2 else mutated)(draw, bases()[name])

    def act() -> None:
        what_of(data)

    return Case(kind, f"{name}: {what}", act)


def control(what_of: Callable[[bytes], list[int]]) -> Case:
    return Case("control", "", lambda: all(len(what_of(joined(base))) >= 4 for base in bases().values()))


def main(argv: list[str] | None = None) -> int:
    chat_template.LimitedProcess = InProcess  # pyright: ignore[reportAttributeAccessIssue, reportPrivateImportUsage]
    bases()
    given = sys.argv[1:] if argv is None else argv
    what_of = read if "--open" in given else outcome
    rest = [one for one in given if one != "--open"]
    return fuzzing.main(__doc__, partial(make, what_of), partial(control, what_of), LIMITS, rest)


if __name__ == "__main__":
    sys.exit(main())
