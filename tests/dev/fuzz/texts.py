"""Fuzzes tokenizers with texts: no text may become a control token, and its ids give the text back.

In: a seed, and with --vocabs FOLDER the GGUF files of a folder, besides the bundled model's vocabulary, small ones of
each kind, and one of bytes with each pre-tokenizer. Out: the table of `fuzzing.py`; a case is a text for all of them.
"""

import argparse
import random
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import mlc_amd
from mlc_amd.compiler.gguf import read_metadata
from mlc_amd.compiler.tokenizer import export
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.text import chat_template
from mlc_amd.runtime.text.pre_tokenizers import PRE_TOKENIZERS
from mlc_amd.runtime.text.tokenizer import MARK, Tokenizer
from tests.dev.fuzz import fuzzing
from tests.dev.fuzz.fuzzing import Case, Limits
from tests.dev.fuzz.gguf import InProcess, bases, message, unknown_token
from tests.dev.fuzz.gguf_mutations import joined

# All vocabularies take their turn with a text, on a machine that may be busy.
LIMITS = Limits(seconds=120)
BUNDLED = Path(mlc_amd.__file__).parent / "dist" / "demo" / "llama-q4_k_m.gguf"
_PIECES = (
    " ", "  ", "\n", "\r\n", "\t", "\u00a0", "\u3000", "\u2028", "\x00", "\x1b[31m", "\x7f", "\ufeff", "\ufffd", MARK,
    "\u200d", "\u0301", "e\u0301", "\ufb01", "ß", "İ", "ı", "\u017f", "Ǆ", "Σ", "ς", "½", "Ⅷ", "٣", "१", "漢字", "ひら",
    "한국어", "ไทย", "עברית", "\u202e", "🦙", "👨\u200d👩", "🇧🇬", "\U0010ffff", "\U000e0001", "a", "B", "the", "don't",
    "'RE", "1", "12345678", "3.14", "0x1F", "!!", "...", "--", "_", "#", "//", "{}", "<|", "|>", "<", ">", "▁", "Ġ",
    "Ċ", "<0x0A>", "[EMPTY_1]",
)  # fmt: skip


@dataclass(frozen=True)
class Vocabulary:
    """faithful: whether ids give the text back: all bytes are tokens, nothing is normalized (as for WordPiece and
    unigrams), and no added token takes spaces after it."""

    name: str
    tokenizer: Tokenizer
    unknown: str
    faithful: bool


def _load(name: str, metadata: dict[str, object], folder: Path) -> Vocabulary:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        export(metadata, folder)
    tokenizer = Tokenizer.load(folder)
    known = {tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size) if not tokenizer.is_added(i)}
    takes_spaces = "phi" in str(metadata.get("general.name")).lower()
    normalizes = metadata["tokenizer.ggml.model"] in ("bert", "t5")
    faithful = not takes_spaces and not normalizes and all(bytes((byte,)) in known for byte in range(256))
    return Vocabulary(name, tokenizer, unknown_token(folder), faithful)


def load(folder: Path | None) -> list[Vocabulary]:
    """The vocabularies: those of the module's docstring."""
    with tempfile.TemporaryDirectory() as scratch:
        found, place = [], Path(scratch)
        for name, base in bases().items():
            (place / "base.gguf").write_bytes(joined(base))
            metadata = read_metadata(place / "base.gguf")
            found.append(_load(name, metadata, place / name))
            if name == "byte-level":
                for pre in {of: pre for pre, of in PRE_TOKENIZERS.items() if of.byte_level}.values():
                    found.append(_load(pre, metadata | {"tokenizer.ggml.pre": pre}, place / pre))
        for path in [BUNDLED, *(sorted(folder.glob("*.gguf")) if folder else [])]:
            found.append(_load(path.stem, read_metadata(path), place / path.stem))
    return found


VOCABULARIES: list[Vocabulary] = []


def _token(draw: random.Random) -> str:
    """A token of some vocabulary as it is written, whole or not, in another case."""
    tokenizer = draw.choice(VOCABULARIES).tokenizer
    control = [i for i in range(max(0, tokenizer.vocab_size - 300), tokenizer.vocab_size) if tokenizer.is_special(i)]
    i = draw.choice(control) if control and draw.random() < 0.7 else draw.randrange(tokenizer.vocab_size)
    text = tokenizer.token_text(i)
    at = draw.randrange(len(text))
    return draw.choice(
        (text, text, text, text.upper(), text[:at] + MARK + text[at:], MARK + text, text[at:], text[:at])
    )


def _mixed(draw: random.Random) -> str:
    return "".join(draw.choice(_PIECES) if draw.random() < 0.7 else _token(draw) for _ in range(draw.randint(0, 30)))


def _controls(draw: random.Random) -> str:
    return "".join(_token(draw) for _ in range(draw.randint(1, 10)))


def _characters(draw: random.Random) -> str:
    high = draw.choice((128, 256, 0x3000, 0x110000))
    return "".join(map(chr, (draw.randrange(high) for _ in range(draw.randint(1, 60)))))


def _repeated(draw: random.Random) -> str:
    """Long runs, which a regex of a pre-tokenizer may go back over."""
    run = draw.choice((*_PIECES, _token(draw))) * draw.choice((100, 1000))
    return draw.choice(("", "a", "\n")) + run + draw.choice(("", "a", "\n", "1.", _mixed(draw)))


_KINDS: dict[str, Callable[[random.Random], str]] = {
    "mixed": _mixed, "control tokens": _controls, "characters": _characters, "repeated": _repeated,
}  # fmt: skip


def act_on(text: str) -> bool:
    """Whether all vocabularies give the text back. UserError of one that does not take it, at the end; AssertionError
    for a forged token."""
    expected, refused = _written(text.replace(MARK, "")), None
    for vocabulary in VOCABULARIES:
        try:
            ids = message(vocabulary.tokenizer, text, vocabulary.unknown)
        except UserError as error:
            refused = error
            continue
        given = _written(vocabulary.tokenizer.decode(ids))
        assert not vocabulary.faithful or given == expected, f"{vocabulary.name}: other text"
    if refused:
        raise refused
    return True


def _written(text: str) -> str:
    """The text as SentencePiece knows it, which writes a space as "▁"."""
    return text.replace("▁", " ")


def make(draw: random.Random) -> Case:
    kind = draw.choices(list(_KINDS), (4, 4, 3, 1))[0]
    text = _KINDS[kind](draw)
    return Case(kind, ascii(text[:200]), lambda: act_on(text))


def control() -> Case:
    return Case("control", "", lambda: act_on("Hello, world! 123\n"))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--vocabs", type=Path)
    given, others = parser.parse_known_args(argv)
    chat_template.LimitedProcess = InProcess  # pyright: ignore[reportAttributeAccessIssue, reportPrivateImportUsage]
    VOCABULARIES.extend(load(given.vocabs))
    return fuzzing.main(__doc__, make, control, LIMITS, others)


if __name__ == "__main__":
    sys.exit(main())
