"""`mlc-amd perplexity`: measures how well a model predicts a text."""

import time
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np

from mlc_amd.runtime.engine.engine import Engine
from mlc_amd.runtime.errors import UsageError, UserError
from mlc_amd.runtime.images.pictures import read_picture
from mlc_amd.runtime.images.rows import Prompt
from mlc_amd.runtime.options import MANY, LoadOptions, Option
from mlc_amd.runtime.sampling.sampler import log_sums
from mlc_amd.runtime.text.traced_text import Traced
from mlc_amd.tools.hub import models
from mlc_amd.tools.options import Json, Without
from mlc_amd.tools.terminal import display
from mlc_amd.tools.terminal.texts import read_text

if TYPE_CHECKING:
    from PIL.Image import Image

_CHUNK = 256  # tokens scored at a time: their logits are [_CHUNK, vocab] float32


def run(
    model: str | None = None,
    *,
    text: str | None = None,
    ids: str | None = None,
    tokens: Annotated[int | None, Option(
        "use only the first N tokens", default="as many as the context holds", low=2, high=MANY)] = None,
    logits: str | None = None,
    image: str | None = None,
    json: Json = False,
    load: Annotated[LoadOptions, Without("model", "tuned", "kv_tokens", "cache_disk", "draft")],
) -> None:  # fmt: skip
    """Measures the perplexity of a model on the tokens of a text, in one window.

    Every token but the first is predicted from all before it; perplexity is the exponential of the mean of
    -log(probability) over these predictions. A smaller one is better; compare only models with the same vocabulary, on
    the same tokens.

    Args:
        model: artifact folder, GGUF file, or OWNER/REPO:QUANT of huggingface.co (compiled on first use); the
            bundled one if omitted.
        text: a UTF-8 text file; "-" is stdin.
        ids: instead of a text, an .npz file with the token ids in its array `ids`.
        logits: write `logits` (float32 [tokens, vocab]) and `ids` to this .npz file.
        image: a picture in the place of each -1 among the --ids; of its rows, which are negative in `ids`, only the
            last has logits.
    """
    if image is not None and (ids is None or tokens is not None):
        raise UsageError("--image goes with --ids FILE.npz, of which all are used")
    if (text is None) == (ids is None):
        raise UsageError("give either --text FILE or --ids FILE.npz")
    read = read_text(text) if text is not None else None
    given = _read_ids(Path(ids).expanduser()) if ids is not None else np.empty(0, np.int64)
    seen = None if image is None else read_picture(image)
    engine = models.load_engine(replace(load, model=model), sees=seen is not None)
    sequence = given if read is None else np.asarray(engine.tokenizer.encode(read), dtype=np.int64)
    prompt = Prompt(sequence.tolist()) if seen is None else _with_image(engine, sequence, seen)
    sequence = np.array(prompt, np.int64)
    count = len(sequence) if image else _count(len(sequence), tokens, engine.cache.longest)
    sequence = sequence[:count]
    kept = np.zeros((count, engine.vocab), np.float32) if logits is not None else None
    start = time.perf_counter()
    losses = []
    for first, scores in _scores(engine, prompt, count):
        if kept is not None:
            kept[first : first + len(scores)] = scores
        following = sequence[first + 1 : first + 1 + len(scores)]
        texts = np.flatnonzero(following >= 0)
        losses.append(negative_log_likelihoods(scores[texts], following[texts]))
    seconds = time.perf_counter() - start
    nll = np.concatenate(losses)
    if logits is not None and kept is not None:
        with open(Path(logits).expanduser(), "wb") as file:
            np.savez(file, logits=kept, ids=sequence.astype(np.int32))
    # The standard error of the mean, propagated through the exponential, as in llama-perplexity.
    perplexity = float(np.exp(nll.mean()))
    # unknown for a single value
    error = perplexity * float(nll.std(ddof=1)) / len(nll) ** 0.5 if len(nll) > 1 else None
    if json:
        told = {"perplexity": perplexity, "error": error, "nll": float(nll.mean())}
        print(dumps(told | {"tokens": count, "seconds": round(seconds, 3)}))
    else:
        print(f"perplexity {perplexity:.4f}{'' if error is None else f' ± {error:.4f}'} over {count} tokens")
    display.message(f"{count / seconds:.1f} tok/s")


def _scores(engine: Engine, prompt: Prompt, count: int) -> Iterator[tuple[int, np.ndarray]]:
    """For the first `count` tokens: (number of the first token of a part, logits of the part's tokens). Of the rows of
    an image, only the last has logits."""
    first = 0
    while first < count:
        seen = prompt[first] < 0
        end = next((i for i in range(first, count) if (prompt[i] < 0) != seen), count)
        if seen:
            yield end - 1, engine.advance(Prompt(prompt[first:end], prompt.images))[None]
        else:
            end = min(end, first + _CHUNK)
            yield first, engine.score(prompt[first:end])
        first = end


def _with_image(engine: Engine, ids: np.ndarray, picture: "Image") -> Prompt:
    """The ids, with the marks and rows of the picture in the place of each -1."""
    from mlc_amd.runtime.images.projectors import Preparation  # it needs Pillow

    if "vision" not in engine.artifact.manifest:
        raise UserError("the model takes no images: it was compiled without an encoder, see --mmproj")
    encode = partial(engine.tokenizer.encode, add_special=False)
    parts = Preparation(engine.artifact.manifest["vision"]).pieces(picture)
    rows = [encode(Traced.all_own(part)) if isinstance(part, str) else part for part in parts]
    texts = [part[part >= 0].tolist() for part in np.split(ids, np.flatnonzero(ids == -1))]
    return Prompt.of([*texts[0:1], *(piece for text in texts[1:] for piece in (*rows, text))])


def negative_log_likelihoods(logits: np.ndarray, following: np.ndarray) -> np.ndarray:
    """-log softmax(logits[i])[following[i]] in nats, float64 [len(following)]. logits: float32 [n, vocab], n >=
    len(following)."""
    rows = logits[: len(following)]
    return log_sums(rows) - rows[np.arange(len(following)), following]


def _count(available: int, wanted: int | None, context: int) -> int:
    """The number of tokens that are used. Raises UserError if it is too small or too large. Reports on stderr if the
    context cuts the text off."""
    if wanted is not None and wanted > available:
        raise UserError(f"--tokens {wanted}: there are only {available} tokens")
    count = available if wanted is None else wanted
    if count > context and wanted is not None:
        raise UserError(f"--tokens {wanted}: the context holds {context}; use fewer or a larger --ctx")
    if count > context:
        display.message(f"the text is {count} tokens, the context holds {context}: using the first {context}")
        count = context
    if count < 2:
        raise UserError(f"perplexity needs at least 2 tokens, not {count}")
    return count


def _read_ids(path: Path) -> np.ndarray:
    """The array `ids` of an .npz file, int64 [n]."""
    if not zipfile.is_zipfile(path):
        path.open("rb").close()  # raises OSError, if the file cannot be read
        raise UserError(f"{path} is not an .npz file; write one with numpy.savez(file, ids=...)")
    try:
        with np.load(path, allow_pickle=False) as data:
            found = data["ids"]
    except (KeyError, ValueError, zipfile.BadZipFile) as error:
        why = f"has no readable array `ids` ({error}); write one with numpy.savez(file, ids=...)"
        raise UserError(f"{path} {why}") from error
    if found.ndim != 1 or not np.issubdtype(found.dtype, np.integer):
        raise UserError(f"{path}: `ids` must be one row of whole numbers, not {found.dtype} of shape {found.shape}")
    return found.astype(np.int64)
