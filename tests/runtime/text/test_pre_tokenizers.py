"""How text is cut into words, by the names in `tokenizer.ggml.pre`.

`fixtures/text/pre_tokenizers.json` has the names with equal results, and for each text of `pre_tokenizer_cases` a
checksum of its ids. They are those of llama.cpp (llama-cpp-python 0.3.36), except under `own_classes`: there llama.cpp
approximates the classes of the model's regexes, and the ids come from these regexes, run by the Python library `regex`.
"""

import json
from pathlib import Path

import pre_tokenizer_cases as cases
import pytest
from tokenizers import Regex, pre_tokenizers
from vocabularies import TEXTS, build_tokenizer, byte_level_metadata

from mlc_amd.runtime.text.pre_tokenizers import PRE_TOKENIZERS
from mlc_amd.runtime.text.tokenizer import Tokenizer

FAMILIES = json.loads((Path(__file__).parents[2] / "fixtures/text/pre_tokenizers.json").read_text())["families"]


@pytest.fixture
def build(tmp_path):
    return lambda metadata: build_tokenizer(metadata, tmp_path / "model")


def vocabulary(pre: str) -> dict[str, object]:
    if PRE_TOKENIZERS[pre].byte_level:
        return cases.byte_level(pre)
    return cases.characters("gemma4" if pre == "gemma4" else "gpt2", pre)


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.token_text(i) for i in tokenizer.encode(text, parse_special=False)]


def test_every_name_has_expected_ids():
    names = [name for family in FAMILIES for name in family["names"].split()]
    assert sorted(names) == sorted(PRE_TOKENIZERS)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family["names"].split()[0])
def test_ids(build, family):
    tokenizers = {PRE_TOKENIZERS[name]: build(vocabulary(name)) for name in family["names"].split()}
    for tokenizer in tokenizers.values():
        for text, expected in zip(cases.LINES, family["digests"].split(), strict=True):
            ids = tokenizer.encode(text, parse_special=False)
            assert cases.digest(ids) == expected, (text, pieces(tokenizer, text))
            assert tokenizer.decode(ids, skip_special=True) == text


def test_a_text_of_gemma_4_begins_with_its_token_whatever_the_file_says(build):
    metadata = cases.characters("gemma4", "gemma4") | {"tokenizer.ggml.add_bos_token": False}
    del metadata["tokenizer.ggml.pre"]
    assert pieces(build(metadata), "\n\n\n") == ["<begin>", "\n\n\n"]


CUT = "I'LL pay 12345 HelloWorld été 1\n\n  x"
CUTS = {
    "gpt-2": ["I", "'", "LL", " pay", " 12345", " HelloWorld", " été", " 1", "\n\n ", " x"],
    "default": ["I", "'", "LL", " pay", " ", "123", "45", " HelloWorld", " été", " ", "1", "\n\n ", " x"],
    "smollm": ["I", "'", "LL", " pay", " ", "1", "2", "3", "4", "5", " HelloWorld", " été", " ", "1", "\n\n ", " x"],
    "llama-bpe": ["I", "'LL", " pay", " ", "123", "45", " HelloWorld", " été", " ", "1", "\n\n", " ", " x"],
    "qwen2": ["I", "'LL", " pay", " ", "1", "2", "3", "4", "5", " HelloWorld", " été", " ", "1", "\n\n", " ", " x"],
    "tekken": [
        "I",
        "'LL",
        " pay",
        " ",
        "1",
        "2",
        "3",
        "4",
        "5",
        " Hello",
        "World",
        " été",
        " ",
        "1",
        "\n\n",
        " ",
        " x",
    ],
    "gpt-4o": ["I'LL", " pay", " ", "123", "45", " Hello", "World", " été", " ", "1", "\n\n", " ", " x"],
    "deepseek-coder": [
        "I",
        "'",
        "LL",
        " pay",
        " ",
        "1",
        "2",
        "3",
        "4",
        "5",
        " HelloWorld",
        " été",
        " ",
        "1",
        "\n",
        "\n",
        " ",
        " x",
    ],
}


def cut(name: str, text: str) -> list[str]:
    splits = [pre_tokenizers.Split(Regex(regex), behavior="isolated") for regex in PRE_TOKENIZERS[name].splits]
    return [piece for piece, _ in pre_tokenizers.Sequence(splits).pre_tokenize_str(text)]


@pytest.mark.parametrize("name", CUTS)
def test_pre_tokenizer_cuts(name):
    assert cut(name, CUT) == CUTS[name]


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_pre_tokenizers_lose_no_text(name):
    assert all("".join(cut(name, text)) == text for text in TEXTS)


def test_no_pre_tokenizer_loses_text_in_ids(build):
    for name in {pre: name for name, pre in PRE_TOKENIZERS.items() if pre.byte_level}.values():  # one of each family
        tokenizer = build(byte_level_metadata(pre=name))
        assert [tokenizer.decode(tokenizer.encode(text, add_special=False), skip_special=False) for text in TEXTS] == [
            *TEXTS
        ]


def test_whole_words_skip_merging_only_in_families_that_say_so(build):
    texts = {name: build(byte_level_metadata(pre=name)) for name in ("llama-bpe", "qwen2")}
    # No merge makes "Ġhello", so only a family with ignore_merges finds it.
    pieces = {name: [t.token_text(i) for i in t.encode(" hello", add_special=False)] for name, t in texts.items()}
    assert pieces == {"llama-bpe": ["Ġhello"], "qwen2": ["Ġ", "hello"]}
