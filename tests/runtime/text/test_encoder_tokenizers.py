"""WordPiece and unigram vocabularies: ids against those of llama.cpp, texts that become no control tokens, pairs, and
damaged vocabularies."""

import json
from pathlib import Path

import pytest
from encoder_vocabularies import TEXTS, VOCABULARIES
from pre_tokenizer_cases import digest
from vocabularies import read_metadata

from mlc_amd.compiler import tokenizer
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.text.tokenizer import Tokenizer

KNOWN = json.loads((Path(__file__).parents[2] / "fixtures/text/encoder_tokenizers.json").read_text())
# Where llama.cpp approximates BERT's own classes of characters: spacing marks, Hangul in NFD, U+0085.
OWN = {"bert": ("नमस्ते", "한국어", "nbsp"), "bert-cased": ("nbsp",)}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    def load(metadata) -> Tokenizer:
        folder = tmp_path_factory.mktemp("vocabulary")
        tokenizer.export(metadata, folder)
        return Tokenizer.load(folder)

    return load


@pytest.mark.parametrize("name", VOCABULARIES)
def test_ids_are_those_of_llama_cpp(name, loaded):
    found, own = loaded(VOCABULARIES[name]), OWN.get(name, ())
    for text, expected in zip(TEXTS, KNOWN[name], strict=True):
        assert (digest(found.encode(text)) == expected) != text.startswith(own or ("\0",)), text


@pytest.mark.parametrize("name", ["bert-bge", "nomic-bert-moe"])
def test_llama_cpp_vocabularies(shared, loaded, name):
    path = shared / "vocabs" / f"ggml-vocab-{name}.gguf"
    if not path.exists():
        pytest.skip(f"{path.name} is not in the reference data")
    texts = Path(f"{path}.inp").read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
    found, lines = loaded(read_metadata(path)), Path(f"{path}.out").read_text(encoding="utf-8").split("\n")
    for text, line in zip(texts, lines, strict=True):
        assert found.encode(text, add_special=False, parse_special=False) == [int(i) for i in line.split()], text


def test_texts_and_pairs(loaded):
    bert, xlm = loaded(VOCABULARIES["bert"]), loaded(VOCABULARIES["xlm-r"])
    assert bert.encode("a")[0] == 101 and bert.encode("a")[-1] == 102
    assert 102 not in bert.encode("[SEP]", add_special=False, parse_special=False)
    a, b = (bert.encode(text, add_special=False) for text in ("hello", "world"))
    assert bert.encode_pair("hello", "world") == [101, *a, 102, *b]
    assert 102 not in bert.encode_pair("[SEP]", "x")[1:-2]
    a, b = (xlm.encode(text, add_special=False) for text in ("hello", "world"))
    assert xlm.encode_pair("hello", "world") == [0, *a, 2, *b, 2]
    assert bert.decode(bert.encode("hello world")) == "hello world"


def test_template_of_pairs(loaded):
    metadata = VOCABULARIES["bert"] | {"tokenizer.chat_template.rerank": "[CLS] {query} [SEP] {document}"}
    found = loaded(metadata).encode_pair("a {document}", "b [SEP]")
    assert found.count(102) == 1 and found[0] == 101  # texts hold neither places nor control tokens


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("bert", {"tokenizer.ggml.unknown_token_id": 1 << 29}, ""),
        ("xlm-r", {"tokenizer.ggml.scores": [0.0]}, "scores has 1 entries"),
        ("xlm-r", {"tokenizer.ggml.precompiled_charsmap": [7] * 9}, "charsmap"),
        ("xlm-r", {"tokenizer.ggml.treat_whitespace_as_suffix": True}, "suffix"),
        (
            "xlm-r",
            {"tokenizer.ggml.scores": [float("nan")] * len(VOCABULARIES["xlm-r"]["tokenizer.ggml.tokens"])},
            "scores",
        ),
    ],
)
def test_damaged(name, changes, message, loaded):
    metadata = VOCABULARIES[name] | changes
    if not message:
        with pytest.warns(UserWarning, match="unknown_token_id"):
            loaded(metadata)
        return
    with pytest.raises(UserError, match=message):
        loaded(metadata)
