"""`mlc-amd embed`: computes vectors of texts, or a picture's features by a model's image encoder."""

import json
import sys
import time
from pathlib import Path
from typing import Annotated

import numpy as np

from mlc_amd.runtime.errors import UsageError, UserError
from mlc_amd.runtime.options import MANY, LoadOptions, Option
from mlc_amd.tools.hub import models
from mlc_amd.tools.options import File, Without
from mlc_amd.tools.terminal import display
from mlc_amd.tools.terminal.texts import read_text

# options about a cache, or several GPUs
NOT_OF_ENCODERS = Without(
    "tuned",
    "kv_tokens",
    "kv_memory",
    "cache_disk",
    "kv_type",
    "draft",
    "n_cpu_moe",
    "split",
    "gpus",
    "devices",
    "tensor_split",
)
Texts = Annotated[tuple[str, ...], Option("a text; may be repeated")]
Truncate = Annotated[bool, Option("cut texts that are longer than the model takes, instead of refusing them")]
SHORT = {"o": "output", "f": "file"}


def run(
    *,
    text: Texts = (),
    file: File = None,
    normalize: bool = True,
    truncate: Truncate = False,
    dimensions: Annotated[int, Option("only so many leading numbers of each vector; 0: all", low=0, high=MANY)] = 0,
    image: str | None = None,
    output: str | None = None,
    load: Annotated[LoadOptions, NOT_OF_ENCODERS],
) -> None:  # fmt: skip
    """Computes the vectors of texts with an embedding model, one line of JSON each: {"index", "embedding"}.

    With --image: the rows of numbers that take the place of tokens in a decoder, by its image encoder (--mmproj).

    Args:
        normalize: vectors of length 1; --normalize false leaves them as they are.
        image: a picture (PNG, JPEG, WebP or GIF). The .npz file has `features`, float32 [rows, columns], of all tiles
            of the picture one after the other, and `tiles`, the number of rows of each.
        output: write to this file instead: an .npz with the array `embeddings`, float32 [texts, numbers], or lines of
            JSON (.jsonl).
    """
    if image is not None:
        if text or file is not None or output is None or Path(output).suffix != ".npz":
            raise UsageError("embed --image FILE takes no texts, and needs -o FILE.npz")
        from mlc_amd.tools import picture_features

        picture_features.write(load, image, output)
        return
    texts = read_texts(text, file)
    if output is not None and Path(output).suffix not in (".npz", ".jsonl"):
        raise UsageError(f"--output {output}: its name must end in .npz or .jsonl")
    with models.load_encoder(load) as encoder:
        if output is not None and Path(output).suffix == ".npz" and encoder.encoder["pooling"] == "none":
            raise UserError("--pooling none gives each text its own number of vectors: write them to a .jsonl file")
        start = time.perf_counter()
        ids = encoder.ids(texts, truncate)
        vectors = encoder.embed(ids, normalize, dimensions=dimensions)
        seconds = time.perf_counter() - start
    if output is not None and Path(output).suffix == ".npz":
        with open(Path(output).expanduser(), "wb") as target:
            np.savez(target, embeddings=vectors)
    else:
        write_lines(({"index": i, "embedding": x.tolist()} for i, x in enumerate(vectors)), output)
    display.message(f"{len(texts)} texts, {sum(map(len, ids)) / seconds:.1f} tok/s")


def read_texts(given: tuple[str, ...], file: str | None) -> list[str]:
    """The texts of the command line, and the lines of a file that are not empty. Raises UsageError without any."""
    texts = [*given, *(line for line in (read_text(file) if file is not None else "").splitlines() if line.strip())]
    if not texts:
        raise UsageError("give texts with --text, or a file with one a line with --file")
    return texts


def write_lines(values, output: str | None) -> None:
    """Writes lines of JSON, to a file or stdout."""
    if output is None:
        for value in values:
            sys.stdout.write(json.dumps(value, ensure_ascii=False) + "\n")
        return
    with open(Path(output).expanduser(), "w", encoding="utf-8") as target:
        target.writelines(json.dumps(value, ensure_ascii=False) + "\n" for value in values)
