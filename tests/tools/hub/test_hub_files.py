"""What the names of a hub's models mean."""

import pytest

from mlc_amd.runtime.errors import UserError
from mlc_amd.tools.hub import hub_files
from mlc_amd.tools.hub.hub_files import File, Name

PARTS = [f"BF16/Qwen3-8B-BF16-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
REPO = [
    "README.md",
    "Qwen3-8B-IQ4_NL.gguf",
    "Qwen3-8B-Q4_K_M.gguf",
    "Qwen3-8B-Q8_0.gguf",
    "Qwen3-8B-UD-Q4_K_XL.gguf",
    "Qwen3-8B-Q4_K_M.imatrix.gguf",
    "mmproj-Qwen3-8B-Q8_0.gguf",
    *PARTS,
]


def chosen(files: list[str], name: str) -> list[str]:
    parsed = hub_files.parse(name)
    assert parsed
    model = hub_files.choose(parsed, hub_files.models(File(path, 1 << 30) for path in files))
    return [model.parts[number].path for number in range(model.count)]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("bartowski/Qwen3-8B-GGUF", Name("bartowski/Qwen3-8B-GGUF")),
        ("bartowski/Qwen3-8B-GGUF:Q4_K_M", Name("bartowski/Qwen3-8B-GGUF", "Q4_K_M")),
        ("a/b:BF16/x-BF16", Name("a/b", "BF16/x-BF16")),
        ("a/b:x.gguf", Name("a/b", "x.gguf")),
        ("models/x.gguf", None),
        ("model.gguf", None),
        ("./a/b", None),
        ("../a", None),
        ("/a/b", None),
        ("~/a", None),
        ("a/b/c", None),
        ("a/b:", None),
        ("a/b--c", None),
        ("a/" + "b" * 95, None),
        ("a/b c", None),
        ("hf.co/a/b:Q4_K_M", Name("a/b", "Q4_K_M")),
        ("hf.co/a/b:latest", Name("a/b")),
        ("huggingface.co/a/b", Name("a/b")),
        ("hf://a/b/BF16/x.gguf", Name("a/b", "BF16/x.gguf")),
        ("https://huggingface.co/a/b", Name("a/b")),
        ("https://huggingface.co/a/b/", Name("a/b")),
        ("https://huggingface.co/a/b/tree/main", Name("a/b")),
        ("https://huggingface.co/a/b/blob/main/x.gguf", Name("a/b", "x.gguf")),
        ("https://hf.co/a/b/resolve/main/BF16/x.gguf?download=true", Name("a/b", "BF16/x.gguf")),
        ("https://example.com/a/b", None),
    ],
)
def test_names(text, name):
    assert hub_files.parse(text) == name


@pytest.mark.parametrize(
    ("quant", "file"),
    [
        ("", "Qwen3-8B-Q4_K_M.gguf"),
        (":q4_k_m", "Qwen3-8B-Q4_K_M.gguf"),
        (":Q8_0", "Qwen3-8B-Q8_0.gguf"),
        (":IQ4_NL", "Qwen3-8B-IQ4_NL.gguf"),
        (":Q4_K_XL", "Qwen3-8B-UD-Q4_K_XL.gguf"),
        (":UD-Q4_K_XL", "Qwen3-8B-UD-Q4_K_XL.gguf"),
        (":Qwen3-8B-Q8_0.gguf", "Qwen3-8B-Q8_0.gguf"),
    ],
)
def test_one_file_is_chosen(quant, file):
    assert chosen(REPO, f"a/b{quant}") == [file]


def test_all_parts_are_chosen_in_order():
    assert chosen(REPO[::-1], "a/b:bf16") == PARTS


def test_without_a_quant_the_first_usual_one_is_chosen():
    assert chosen(["x-Q6_K.gguf", "x-Q8_0.gguf"], "a/b") == ["x-Q8_0.gguf"]
    assert chosen(["x-Q6_K.gguf", "x-Q5_K_M.gguf", "mmproj-F16.gguf"], "a/b") == ["x-Q5_K_M.gguf"]


def test_an_exact_quant_precedes_one_that_contains_it():
    files = ["x-UD-Q4_K_M.gguf", "x-Q4_K_M.gguf"]
    assert chosen(files, "a/b:Q4_K_M") == chosen(files, "a/b") == ["x-Q4_K_M.gguf"]


@pytest.mark.parametrize(
    ("files", "name", "message"),
    [
        (REPO, "a/b:Q4_NL", r"a/b has no Q4_NL; it has BF16 \(3.00 GiB\), IQ4_NL \(1.00 GiB\), Q4_K_M .*, UD-Q4_K_XL"),
        (REPO, "a/b:Q4_K", "has no Q4_K;"),
        (["mmproj-F16.gguf", "model.safetensors"], "a/b", "a/b has no GGUF file"),
        (
            ["x-1B-Q8_0.gguf", "x-8B-Q8_0.gguf"],
            "a/b:q8_0",
            r"may mean x-1B-Q8_0 \(.*\), x-8B-Q8_0 .*such as a/b:x-1B-Q8",
        ),
        (["x-1B-Q8_0.gguf", "x-8B-Q8_0.gguf"], "a/b", "may mean x-1B-Q8_0"),
    ],
)
def test_what_is_not_decided_lists_what_there_is(files, name, message):
    with pytest.raises(UserError, match=message):
        chosen(files, name)


def test_parts_that_are_missing_are_known():
    (model,) = hub_files.models([File(PARTS[0], 1), File(PARTS[2], 2)])
    assert (model.missing, model.size, model.quant) == ([1], 3, "BF16")
