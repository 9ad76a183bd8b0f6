"""`mlc-amd tokenize`: shows how a model's tokenizer splits a text."""

from json import dumps
from pathlib import Path

from mlc_amd.runtime.errors import UsageError
from mlc_amd.runtime.folders import temporary
from mlc_amd.runtime.text.tokenizer import Tokenizer
from mlc_amd.tools.hub import models
from mlc_amd.tools.options import File, Json
from mlc_amd.tools.terminal import display
from mlc_amd.tools.terminal.texts import read_text

SHORT = {"f": "file"}


def run(
    model: str | None = None,
    text: str | None = None,
    *,
    file: File = None,
    ids_only: bool = False,
    json: Json = False,
    no_special: bool = False,
) -> None:
    """Shows the tokens of a text, one a line: id and what the vocabulary calls it.

    Args:
        model: an artifact's folder, a GGUF file (a vocabulary-only one will do; nothing is compiled), or
            OWNER/REPO:QUANT of huggingface.co; the bundled model if only a text or --file is given.
        text: the text.
        ids_only: print the ids alone, separated by spaces.
        no_special: do not add the beginning-of-text token and take texts like <|im_end|> literally.
    """
    if model is not None and text is file is None and not model.endswith(".gguf") and models.local(model) is None:
        model, text = None, model
    if (text is None) == (file is None):
        raise UsageError("give either a TEXT (in quotes) or --file FILE")
    if ids_only and json:
        raise UsageError("give --ids-only or --json, not both")
    tokenizer = load_tokenizer(models.find(model) if model else models.default_model())
    given = read_text(file) if file is not None else text or ""
    ids = tokenizer.encode(given, add_special=not no_special, parse_special=not no_special)
    names = [tokenizer.token_text(token) for token in ids]
    if json:
        print(dumps({"ids": ids, "tokens": names}, ensure_ascii=False))
    elif ids_only:
        print(*ids)
    else:
        for token, name in zip(ids, names, strict=True):
            print(f"{token:>7} {name!r}")
        display.message(f"{len(ids)} tokens")


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of an artifact; or of a GGUF file, through the compiler's conversion."""
    if models.is_artifact(path):
        return Tokenizer.load(path)
    models.check_compiler(path)
    from mlc_amd.compiler import tokenizer
    from mlc_amd.compiler.gguf.reader import read_metadata

    with temporary("tokenize") as directory:
        tokenizer.export(read_metadata(path), directory)
        return Tokenizer.load(directory)
