"""`mlc-amd rerank`: scores how well texts answer a query."""

from typing import Annotated

import numpy as np

from mlc_amd.runtime.errors import UsageError
from mlc_amd.runtime.options import MANY, LoadOptions, Option
from mlc_amd.tools.commands.embed import NOT_OF_ENCODERS, Texts, Truncate, read_texts, write_lines
from mlc_amd.tools.hub import models
from mlc_amd.tools.options import File

SHORT = {"q": "query", "f": "file", "o": "output"}


def run(
    *,
    query: str | None = None,
    text: Texts = (),
    file: File = None,
    top: Annotated[int, Option("only so many texts, the best ones; 0: all", low=0, high=MANY)] = 0,
    truncate: Truncate = False,
    output: str | None = None,
    load: Annotated[LoadOptions, NOT_OF_ENCODERS],
) -> None:  # fmt: skip
    """Scores texts by how well they answer a query, with a ranking model: one line of JSON each, the best first:
    {"index", "score", "text"}.

    Args:
        query: what the texts are to answer.
        output: write the lines to this file.
    """
    if not query:
        raise UsageError("give a --query")
    texts = read_texts(text, file)
    with models.load_encoder(load) as encoder:
        scores = encoder.rerank(query, texts, truncate)
    order = np.argsort(-scores, kind="stable")[: top or None]
    write_lines(({"index": int(i), "score": float(scores[i]), "text": texts[i]} for i in order), output)
