"""Vocabularies that are malformed or of an unknown kind, and files of a compiled model that are missing or corrupt: one
clear line each."""

import json

import pytest
from vocabularies import build_tokenizer, byte_level_metadata, sentencepiece_metadata

from mlc_amd.compiler.tokenizer import export
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.text.tokenizer import Tokenizer


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": None}, "tokenizer.ggml.model"),
        ({"model": "rwkv"}, "'rwkv' is not supported"),
        ({"tokens": None}, "tokenizer.ggml.tokens"),
        ({"tokens": "abc"}, "expected list"),
        ({"tokens": [1, 2]}, "wrong type"),
        ({"tokens": ["a", "b", "a"]}, "twice"),
        ({"tokens": ["a", "▁" * 260_000]}, "a token of 260000 characters"),
        ({"tokens": ["<x>", "\ufdd0<x>"], "token_type": [3, 1]}, "twice"),
        ({"token_type": [1, 1]}, "2 entries for 265 tokens"),
        ({"merges": None}, "tokenizer.ggml.merges"),
        ({"merges": ["he"]}, "space between"),
        ({"bos_token_id": None}, "bos_token_id"),
        ({"pre": "no-such-name"}, "pre-tokenizer 'no-such-name' is not supported"),
        ({"model": "llama"}, "tokenizer.ggml.scores"),
    ],
)
def test_bad_metadata(tmp_path, changes, message):
    with pytest.raises(UserError, match=message) as caught:
        export(byte_level_metadata(**changes), tmp_path)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_special_id_out_of_range_is_ignored(tmp_path):
    with pytest.warns(UserWarning, match="eos_token_id is 9999"):
        assert build_tokenizer(byte_level_metadata(eos_token_id=9999), tmp_path).eos_id is None


def test_a_missing_pre_tokenizer_warns_and_is_the_default(tmp_path):
    with pytest.warns(UserWarning, match="names no pre-tokenizer .* 'default'"):
        tokenizer = build_tokenizer(byte_level_metadata(pre=None, add_bos_token=False), tmp_path)
    default = build_tokenizer(byte_level_metadata(pre="default"), tmp_path)
    assert tokenizer.encode("hello! 1234") == default.encode("hello! 1234")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [None, b"", b"{", b"[]", b"{}", b"\xff\xfe\x00"])
def test_missing_and_corrupt_files(tmp_path, name, content):
    export(byte_level_metadata(), tmp_path)
    path = tmp_path / name
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(UserError, match=name) as caught:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(caught.value)


def test_files_of_two_models_mixed(tmp_path):
    export(byte_level_metadata(), tmp_path / "a")
    export(sentencepiece_metadata(), tmp_path / "b")
    (tmp_path / "a/tokenizer.json").replace(tmp_path / "b/tokenizer.json")
    with pytest.raises(UserError, match="265 tokens, its config 4096"):
        Tokenizer.load(tmp_path / "b")


@pytest.mark.parametrize("part", ["pre_tokenizer", "normalizer", "post_processor", "truncation"])
def test_a_pipeline_from_elsewhere(tmp_path, part):
    """A regex that takes time without end for a line of text, for example."""
    export(byte_level_metadata(), tmp_path)
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text())
    split = {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated", "invert": False}
    content[part] = {
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split]},
        "normalizer": {"type": "Replace", "pattern": {"Regex": "(x+x+)+y"}, "content": ""},
        "post_processor": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "truncation": {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0},
    }[part]
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"is not what this version of mlc-amd writes|: expected null"):
        Tokenizer.load(tmp_path)
