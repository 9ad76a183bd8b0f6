"""Command lines: what is understood, llama.cpp's names of flags, and mistakes in one line."""

import numpy as np
import pytest
from PIL import Image

from mlc_amd.runtime.errors import UserError
from mlc_amd.tools import arguments, cli, familiar
from mlc_amd.tools.commands import bench, chat, serve


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (["m", "--prompt", "a=b"], ["--model=m", "--prompt=a=b"]),
        (["--prompt=--x", "--", "-m"], ["--prompt=--x", "--model=-m"]),
        (["-p", "x", "--max_tokens", "3"], ["--prompt=x", "--max_tokens=3"]),
        (["--stop", "a", "--stop", "b,c"], ['--stop=["a", "b,c"]']),
        (["-"], ["--model=-"]),
        (["--", "--help"], ["--model=--help"]),
        (["m", "Why?"], ["--model=m", "--prompt=Why?"]),
        (["m", "-cnv", "-fa", "on", "-fa", "-b", "9", "--ubatch-size=9", "-np", "2", "-v", "--jinja"], ["--model=m"]),
    ],
)
@pytest.mark.filterwarnings("ignore:.* has no effect")
def test_arguments_are_normalized(tokens, expected):
    assert sorted(arguments.normalize(chat.run, chat.SHORT, tokens)) == sorted(expected)


def test_integers_accept_what_people_type():
    parse = arguments.parameters(chat.run)["max_tokens"].read
    assert (parse("1e3"), parse("64"), parse("0x10")) == (1000, 64, 16)
    with pytest.raises(UserError, match="--max-tokens must be a whole number, not 'inf'"):
        parse("inf")
    assert parse("-1") is arguments.parameters(chat.run)["seed"].read("-1") is None  # as in llama.cpp


@pytest.mark.parametrize(
    ("word", "known", "found"),
    [
        ("--versoin", ("--version", "-ctv", "--verify"), "--version"),
        ("-cnv", ("-ctv",), None),
        ("lsit", ("list", "ls"), "list"),
        ("--temper", ("--temperature", "--temp"), "--temperature"),
        ("--n-", ("--n-cpu-moe", "--n-predict"), None),
    ],
)
def test_the_nearest_word_has_the_fewest_edits(word, known, found):
    assert familiar.nearest(word, known) == found


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (("caht",), "did you mean chat"),
        (("frobnicate",), "choose from chat"),
        (("chat", "--tempreature", "1"), "did you mean --temperature"),
        (("chat", "-z"), "unknown flag -z"),
        (("chat", "--temperature", "warm"), "--temperature must be a number, not 'warm'"),
        (("chat", "--temperature", "-1"), "temperature is -1.0"),
        (("chat", "--max-tokens", "1.5"), "--max-tokens must be a whole number"),
        (("--versoin",), "did you mean --version?"),
        (("chat", "--versoin"), "did you mean --version?"),
        (("stop",), "Ctrl-C"),
        (("cache", "clear"), "ACTION must be ls, ps, rm or prune, not 'clear'"),
        (("chat", "--target", "cuda"), "such GPUs run with --target vulkan"),
        (("chat", "--target", "abacus"), "--target must be auto, cpu, rocm or vulkan"),
        (("chat", "--grammar", "x", "--json-schema", "{}"), "give one of --grammar, --json-schema"),
        (("generate", "-p", "x", "--json-schema", "{"), "--json-schema is not JSON"),
        (("serve", "a", "b", "--alias", "c"), "--alias is a name for one model"),
        (("serve", "a", "--alias="), "--alias is a name for one model"),
        (("tune", "--seed", "-1"), "--seed of tune must be at least 1"),
        (("chat", "--max-tokens", "0"), "at least 1"),
        (("chat", "--prompt"), "--prompt needs a value"),
        (("chat", "--on-full", "maybe"), "--on-full must be error or drop"),
        (("chat", "a", "b", "c"), "unexpected argument 'c'"),
        (("chat", "--seed", "1", "--seed", "2"), "given twice"),
        (("tokenize",), "give either a TEXT"),
        (("tokenize", "x.gguf"), "give either a TEXT"),
        (("pull", "--list"), "--list lists what a repository has"),
        (("pull",), "pull needs OWNER/REPO:QUANT"),
        (("tokenize", "x", "y", "--ids-only", "--json"), "not both"),
        (("compile",), "GGUF file or --synthetic"),
        (("compile", "model.gguf", "-o", ""), "-o is empty"),
        (("bench", "-p", "0", "-n", "0"), "nothing to measure"),
        (("bench", "-p", "12,x"), "--n-prompt must be whole numbers with commas"),
        (("bench", "-o", "xml"), "md, json, jsonl or csv"),
        (("perplexity", "x"), "--text FILE or --ids"),
    ],
)
def test_mistakes_are_one_line(capsys, tokens, message):
    assert cli.main(tokens) == 2
    assert_one_line(capsys, message)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (("chat", "/nowhere/model.gguf"), "/nowhere/model.gguf: no such file"),
        (("compile", "--synthetic", "huge:q4_0"), "unknown preset"),
        (("compile", "--synthetic", "llama3-8b"), "the format is missing; write llama3-8b:q4_0"),
        (("compile", "--synthetic", "tiny:q4_0", "--ctx", "100000"), "--ctx 100000 is more than the 2048 tokens"),
        (("compile", "--synthetic", "tiny:q4_0", "--target", "cpu", "--arch", "pentium"), "pentium"),
        (("compile", "--synthetic", "tiny:q4_0", "--target", "cpu", "--arch", "help"), "unknown CPU arch 'help'"),
        (("compile", "--synthetic", "tiny:q4_0", "--target", "cpu", "--arch", "znver99"), "unknown CPU arch"),
        (("compile", "--synthetic", "tiny:q4_0", "--target", "rocm", "--arch", "gfx1"), "unknown AMD GPU"),
        (("compile", "--synthetic", "tiny:q4_0", "-o", "/"), "/ exists and is not a compiled model"),
        (("pull", "llama3:8b"), "`ollama pull`"),
        (("serve", f"here={__file__}", "/nowhere/model.gguf"), "/nowhere/model.gguf: no such file"),
        (("deploy", __file__, "--to", "linux"), "is a file, and a compiled model is a folder"),
        (
            ("bench", "--synthetic", "tiny:q4_0", "-d", "4096"),
            "was made for 2048: give smaller -d, -p or -n",
        ),
        (("bench", "--synthetic", "tiny:q4_0", "-p", "512", "--ctx", "128"), "give --ctx 512 or more"),
        (("generate", "-p", "x", "--target", "cpu", "--tensor-split", "3,1"), "target 'cpu', which has no GPUs"),
        (("selftest", "--target", "cpu", "--devices", "0,1"), "target 'cpu', which has no GPUs"),
        (("chat", "-p", "x", "--target", "cpu", "--device", "1"), "target 'cpu', not '1'"),
        (
            ("bench", "--synthetic", "tiny:q4_0", "--target", "cpu", "--device", "vulkan"),
            "target vulkan",
        ),
        (("chat", "-p", "x", "--target", "cpu", "--image", __file__), "test_arguments.py is no picture"),
    ],
)
def test_what_cannot_be_done_is_one_line(capsys, tokens, message):
    assert cli.main(tokens) == 1
    assert_one_line(capsys, message)


@pytest.mark.parametrize("verb", ["chat -p x", "generate -p x", "embed -o x.npz", "perplexity --ids {ids}"])
def test_pictures_are_read_before_a_model_is_compiled(capsys, tmp_path, verb):
    damaged, whole, ids = tmp_path / "damaged.png", tmp_path / "whole.png", tmp_path / "ids.npz"
    Image.effect_noise((64, 64), 50).save(whole)
    damaged.write_bytes(whole.read_bytes()[:-1000])
    np.savez(ids, ids=np.array([1, -1, 2]))
    for image, message in (
        (damaged, "damaged.png is damaged (image file is truncated"),
        (whole, "comes without an image encoder"),
    ):
        tokens = (*verb.format(ids=ids).split(), "--target", "cpu", "--image", str(image))
        assert cli.main(tokens) == 1
        assert_one_line(capsys, message)


def assert_one_line(capsys, message: str) -> None:
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.startswith("error: ") and shown.err.count("\n") == 1
    assert message in shown.err


# ---- flags as llama.cpp has them


@pytest.mark.parametrize(
    ("run", "tokens", "expected"),
    [
        (chat.run, ["-m", "x.gguf", "-c", "512", "-t", "2"], ["--model=x.gguf", "--ctx=512", "--threads=2"]),
        (chat.run, ["--temp", "0.5", "--repeat-penalty=1.1"], ["--temperature=0.5", "--repetition_penalty=1.1"]),
        (chat.run, ["-ngl", "0"], ["--target=cpu"]),
        (chat.run, ["-hf", "a/b:Q8_0", "-sys", "Be brief."], ["--model=a/b:Q8_0", "--system=Be brief."]),
        (serve.run, ["--alias", "x", "-hf", "a/b"], ["--alias=x", '--model=["a/b"]']),
        (bench.run, ["--n-gpu-layers", "0", "-t", "4"], ["--target=cpu", "--threads=4"]),
    ],
)
def test_familiar_flags(run, tokens, expected):
    assert sorted(arguments.normalize(run, {}, tokens)) == sorted(expected)


def test_layers_on_a_gpu_are_noted(capsys):
    assert cli.main(["chat", "-ngl", "99", "-m", "/nowhere.gguf"]) != 0
    note, error = capsys.readouterr().err.splitlines()
    assert note.startswith("warning: -ngl 99 has no effect") and "/nowhere.gguf: no such file" in error


def test_familiar_flags_are_in_the_help():
    page = arguments.help_page("chat", chat.run, chat.SHORT)
    assert "-c, --ctx N" in page and "-t, --threads N" in page and "also --temp" in page and "-ngl" in page
