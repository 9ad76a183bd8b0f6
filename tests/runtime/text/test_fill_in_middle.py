"""Prompts for the text between two others, by vocabulary."""

import pytest
from vocabularies import build_tokenizer, byte_level_metadata, sentencepiece_metadata

from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.text.fill_in_middle import FillInMiddle, OtherFile

CONTROL = 3
# the tokens of a family, and the prompt between "he" and "ll", and the same with another file "x": "hello"
FAMILIES = {
    "qwen": (
        "<|fim_prefix|> <|fim_suffix|> <|fim_middle|> <|fim_pad|> <|repo_name|> <|file_sep|>",
        "<|fim_prefix|>he<|fim_suffix|>ll<|fim_middle|>",
        "<|repo_name|>myproject\n<|file_sep|>x\nhello<|file_sep|>filename\n",
    ),
    "starcoder 2": (
        "<fim_prefix> <fim_middle> <fim_suffix> <fim_pad> <repo_name> <file_sep>",
        "<fim_prefix>he<fim_suffix>ll<fim_middle>",
        "<repo_name>myproject\n<file_sep>x\nhello<file_sep>filename\n",
    ),
    "granite": (
        "<fim_prefix> <fim_middle> <fim_suffix> <fim_pad> <filename> <reponame>",
        "<fim_prefix>he<fim_suffix>ll<fim_middle>",
        "<reponame>myproject\n<filename>x\nhello<filename>filename\n",
    ),
    "deepseek": (
        "<｜fim▁begin｜> <｜fim▁hole｜> <｜fim▁end｜>",
        "<｜fim▁begin｜>he<｜fim▁hole｜>ll<｜fim▁end｜>",
        "\n\n--- snippet ---\n\nhello",
    ),
    "codestral": ("[PREFIX] [SUFFIX] [MIDDLE]", "[SUFFIX]ll[PREFIX]he", "\n\n--- snippet ---\n\nhello"),
}


def with_tokens(metadata, names):
    tokens, types = (f"tokenizer.ggml.{key}" for key in ("tokens", "token_type"))
    more = {tokens: [*metadata[tokens], *names], types: [*metadata[types], *[CONTROL] * len(names)]}
    if (scores := "tokenizer.ggml.scores") in metadata:
        more[scores] = [*metadata[scores], *[0.0] * len(names)]
    return metadata | more


@pytest.mark.parametrize("family", FAMILIES)
def test_forms(family, tmp_path):
    names, expected, others = FAMILIES[family]
    tokenizer = build_tokenizer(with_tokens(byte_level_metadata(add_bos_token=False), names.split()), tmp_path)
    fill = FillInMiddle(tokenizer)
    encode = lambda text: tokenizer.encode(text, add_special=False)  # noqa: E731
    assert fill.possible and fill.prompt("he", "ll") == encode(expected)
    assert fill.prompt("he", "ll", [OtherFile("hello", "x")]) == encode(others + expected)
    named = {tokenizer.control_ids[name] for name in names.split() if "pad" not in name and name != "[MIDDLE]"}
    assert fill.stop_ids == named


def test_texts_have_no_control_tokens(tmp_path):
    tokenizer = build_tokenizer(
        with_tokens(byte_level_metadata(add_bos_token=False), FAMILIES["qwen"][0].split()), tmp_path
    )
    texts = "<|fim_middle|>", "<|file_sep|>", [OtherFile("<|im_end|>", "<|repo_name|>")]
    ids = FillInMiddle(tokenizer).prompt(*texts)
    controls = [tokenizer.token_text(i) for i in ids if tokenizer.is_special(i)]
    marks = "<|repo_name|> <|file_sep|> <|file_sep|> <|fim_prefix|> <|fim_suffix|> <|fim_middle|>"
    assert controls == marks.split()


def test_sentencepiece(tmp_path):
    """CodeLlama's, by the keys of its file: a text begins with BOS, the suffix with no space of its own."""
    metadata = with_tokens(sentencepiece_metadata(), ["▁<PRE>", "▁<MID>", "▁<SUF>", "<other>"])
    count = len(metadata["tokenizer.ggml.tokens"])
    keys = {"prefix": count - 4, "middle": count - 3, "suffix": count - 2}
    for changes in ({}, {f"tokenizer.ggml.{name}_token_id": i for name, i in keys.items()}):
        tokenizer = build_tokenizer(metadata | changes, tmp_path)
        fill = FillInMiddle(tokenizer)
        ids = fill.prompt("the", "the")
        spaced, begin = tokenizer.encode("the", add_special=False), ids.index(keys["suffix"])
        assert ids[:2] == [1, keys["prefix"]] and ids[2:begin] == spaced and ids[-1] == keys["middle"]
        inner = b"".join(map(tokenizer.token_bytes, ids[begin + 1 : -1]))
        assert inner == b"the" and b"".join(map(tokenizer.token_bytes, spaced)) == b" the"
    other = build_tokenizer(metadata | {"tokenizer.ggml.fim_pre_token_id": count - 1}, tmp_path)
    assert other.fill["prefix"] == count - 1  # the key comes first


def test_what_is_far_from_the_gap_is_left_out(tmp_path):
    tokenizer = build_tokenizer(
        with_tokens(byte_level_metadata(add_bos_token=False), FAMILIES["qwen"][0].split()), tmp_path
    )
    fill, files = FillInMiddle(tokenizer), [OtherFile("abc" * 9, "x")]
    before, after = "xyz" * 40, "uvw" * 40
    whole = fill.prompt(before, after, files)
    assert fill.prompt(before, after, files, len(whole)) == whole
    for room in (0, 3, 7, 40, 150, 243, 246, 255, len(whole) - 1):
        ids = fill.prompt(before, after, files, room)
        at, end = ids.index(tokenizer.fill["prefix"]), ids.index(tokenizer.fill["suffix"])
        others, first, last = ids[:at], ids[at + 1 : end], ids[end + 1 : -1]
        assert len(ids) == max(room, 3) and whole[: whole.index(ids[at])][::-1][: len(others)] == others[::-1]
        assert before.endswith(tokenizer.decode(first)) and after.startswith(tokenizer.decode(last))
        assert len(last) >= min((room - 3) // 4, 120) and (not others or len(first) == 120)


@pytest.mark.parametrize("names", ["", "<fim_prefix>", "<fim_suffix> <fim_middle>"])
def test_models_without_such_tokens(names, tmp_path):
    fill = FillInMiddle(build_tokenizer(with_tokens(byte_level_metadata(add_bos_token=False), names.split()), tmp_path))
    assert not fill.possible and not fill.stop_ids
    with pytest.raises(UserError, match="has no tokens to fill in the middle"):
        fill.prompt("a", "b")


def test_text_of_bytes_within_a_text(tmp_path):
    """Of guesses of what a grammar forces, too."""
    for metadata in (byte_level_metadata(add_bos_token=False), sentencepiece_metadata()):
        tokenizer = build_tokenizer(metadata, tmp_path)
        for data in (b"the", b" the", b"\nthe", b"", "é".encode(), "the é".encode()[:-1]):
            ids = tokenizer.encode_inner(data)
            text = b"".join(map(tokenizer.token_bytes, ids))
            assert text == data.decode(errors="ignore").encode()
