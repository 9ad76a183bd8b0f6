"""Fill in the middle through all APIs. The bundled model has no tokens for it: others take their place here."""

import pytest
from servers.serving import serving

from mlc_amd.compiler.gguf import GGUFModel
from mlc_amd.compiler.pipeline import compile_model
from mlc_amd.runtime.engine.engine import Engine
from mlc_amd.runtime.options import CompileOptions, RunOptions
from mlc_amd.tools import cli
from mlc_amd.tools.server.library import Library

IDS = {"pre": 1001, "suf": 1002, "mid": 1003, "rep": 1004, "sep": 1005}
BEFORE, AFTER = "import os\n\ndef join(a, b):\n", "\n    return path\n"
GREEDY = {"temperature": 0}
# As llama.vim sends them: to compute a context ahead of time, and to complete a line.
VIM = {
    "id_slot": 0, "input_prefix": "import os\n\n", "input_suffix": AFTER, "prompt": "def join(a, b):\n", "n_predict": 8,
    "input_extra": [{"text": "def split(path):\n", "time": [1, 2], "filename": "paths.py"}], "stop": [], "n_indent": 4,
    "top_k": 40, "top_p": 0.9, "stream": False, "samplers": ["top_k", "top_p", "infill"], "cache_prompt": True,
    "t_max_prompt_ms": 500, "t_max_predict_ms": 1000,
    "response_fields": ["content", "timings/prompt_n", "timings/predicted_n", "truncated", "tokens_cached"],
}  # fmt: skip
AHEAD = VIM | {"prompt": "", "n_predict": 0, "samplers": [], "response_fields": [""]}


@pytest.fixture(scope="module")
def artifact(demo_gguf, once):
    def make(out):
        model = GGUFModel.open(demo_gguf)
        keys = {f"tokenizer.ggml.fim_{name}_token_id": token for name, token in IDS.items()}
        model.metadata = {**model.metadata, **keys}
        compile_model(model, out, CompileOptions(target="cpu", arch="native", ctx=256))

    return once("fills gaps", make)


@pytest.fixture(scope="module")
def filling(artifact):
    with serving(Library({"demo": lambda: Engine.load(artifact, RunOptions(threads=2))})) as found:
        yield found


def expected(server, before=BEFORE, after=AFTER, others=(), **options):
    """What /completion continues the prompt with."""
    prefix, suffix = (server.post("/tokenize", {"content": text})["tokens"] for text in (before, after))
    ids = [*others, IDS["pre"], *prefix, IDS["suf"], *suffix, IDS["mid"]]
    return server.post("/completion", {"prompt": ids, "n_predict": 8, **GREEDY, **options})


def test_infill(filling):
    body = {"input_prefix": BEFORE, "input_suffix": AFTER, "n_predict": 8, **GREEDY}
    whole, wanted = filling.post("/infill", body), expected(filling)
    assert whole["content"] == wanted["content"] and whole["tokens_evaluated"] == wanted["tokens_evaluated"]
    half = body | {"input_prefix": BEFORE[:11], "prompt": BEFORE[11:]}
    assert filling.post("/infill", half)["content"] == whole["content"]
    chunks = filling.stream("/infill", body)
    assert "".join(chunk["content"] for chunk in chunks) == whole["content"] and chunks[-1]["stop"]
    assert filling.post("/infill", body | {"input_prefix": "", "input_suffix": ""})["tokens_evaluated"] == 3


def test_as_an_editor_asks(filling):
    assert filling.post("/infill", AHEAD) == {}
    found = filling.post("/infill", VIM | GREEDY)
    texts = ("myproject\n", "paths.py\n", "def split(path):\n", "filename\n")
    name, file, text, own = (filling.post("/tokenize", {"content": text})["tokens"] for text in texts)
    others = [IDS["rep"], *name, IDS["sep"], *file, *text, IDS["sep"], *own]
    assert found["content"] == expected(filling, others=others)["content"]
    assert found["tokens_cached"] >= len(others) and found["timings/predicted_n"] == 8
    assert set(found) == set(VIM["response_fields"])


def test_long_files_are_cut(filling):
    long = VIM | {"input_extra": [{"text": "a b c\n" * 300}], "input_prefix": "x = 1\n" * 300, "response_fields": []}
    found = filling.post("/infill", long)
    assert 200 < found["tokens_evaluated"] <= 256 - VIM["n_predict"] and not found["truncated"]


def test_suffix_of_openai(filling):
    body = {"prompt": BEFORE, "suffix": AFTER, "max_tokens": 8, **GREEDY}
    wanted = expected(filling)["content"]
    assert filling.post("/v1/completions", body)["choices"][0]["text"] == wanted
    streamed = filling.stream("/v1/completions", body)
    assert "".join(chunk["choices"][0]["text"] for chunk in streamed) == wanted
    two = filling.post("/v1/completions", body | {"prompt": [BEFORE, "x"]})["choices"]
    assert [choice["text"] for choice in two] == [wanted, expected(filling, "x")["content"]]
    for wrong in ({"prompt": [[1, 2]]}, {"echo": True}, {"prompt_logprobs": 1}, {"suffix": 5}):
        status, _, answer = filling.request("/v1/completions", body | wrong)
        assert status == 400 and answer["error"]["message"]


def test_suffix_of_ollama(filling):
    body = {"model": "demo", "prompt": BEFORE, "suffix": AFTER, "options": {"num_predict": 8, **GREEDY}}
    wanted = expected(filling)["content"]
    assert filling.post("/api/generate", body | {"stream": False})["response"] == wanted
    assert "".join(line["response"] for line in filling.stream("/api/generate", body)) == wanted
    assert "insert" in filling.post("/api/show", {"model": "demo"})["capabilities"]


def test_an_answer_ends_at_tokens_of_the_form(filling):
    """Of other files, say, which models for code write next."""
    first = expected(filling, return_tokens=True)["tokens"][0]
    body = {"input_prefix": BEFORE, "input_suffix": AFTER, "n_predict": 8, **GREEDY}
    ends = filling.post("/infill", body | {"logit_bias": [[IDS["sep"], 100]]})
    assert first != IDS["sep"] and ends["content"] == "" and ends["stop_type"] == "eos"


WRONG = [
    {"input_extra": [{}]},
    {"input_extra": [{"filename": "ok"}]},
    {"input_extra": [{"filename": 123}]},
    {"input_extra": [{"filename": 123, "text": "abc"}]},
    {"input_extra": [{"filename": 123, "text": 456}]},
    {"input_extra": {"text": "a"}},
    {"input_extra": ["a"]},
    {"input_prefix": None},
    {"input_suffix": 5},
    {"prompt": ["a"]},
]


@pytest.mark.parametrize("changes", WRONG, ids=str)
def test_wrong_fields(filling, changes):
    status, _, answer = filling.request("/infill", VIM | changes)
    assert status == 400 and answer["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/infill", VIM),
        ("/v1/completions", {"prompt": "a", "suffix": "b"}),
        ("/api/generate", {"model": "demo", "prompt": "a", "suffix": "b"}),
    ],
)
def test_a_model_without_such_tokens(served, path, body):
    status, _, answer = served.request(path, body)
    assert status == 400 and "has no tokens to fill in the middle" in str(answer)


def test_generate(artifact, filling, capsys):
    command = ["generate", str(artifact), "-p", BEFORE, "--suffix", AFTER, "-n", "8", "--temperature", "0", "-q"]
    assert cli.main(command) == 0
    assert capsys.readouterr().out == expected(filling)["content"]
