"""The commands as a user runs them, on the bundled model: what goes to stdout, what to stderr, exit codes, errors. Most
run in this process; what only a process shows (signals, pipes, imports) in one of its own."""

import functools
import io
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

from mlc_amd.compiler.gguf import synthetic, write_gguf
from mlc_amd.tools import arguments, cli
from mlc_amd.tools.commands import inspect, perplexity
from mlc_amd.tools.terminal import terminal

MLC_AMD = str(Path(sys.executable).with_name("mlc-amd"))
QUESTION = "What does os.path.join do?"


@pytest.fixture(scope="session")
def home(first_chat, tmp_path_factory) -> dict[str, str]:
    """An environment with caches that hold the bundled model only."""
    root = tmp_path_factory.mktemp("home")
    return os.environ | {"XDG_CACHE_HOME": str(first_chat[1]), "XDG_STATE_HOME": str(root / "state"), "COLUMNS": "100"}


@pytest.fixture
def mlc_amd(home, capsys, monkeypatch):
    """Runs a command line in this process and returns what a process of its own would have come to."""

    def run(*tokens, stdin: str = "", cwd: Path | None = None) -> subprocess.CompletedProcess:
        line = [*map(str, tokens)]
        with monkeypatch.context() as patch:
            for name in ("XDG_CACHE_HOME", "XDG_STATE_HOME", "COLUMNS"):
                patch.setenv(name, home[name])
            patch.setattr("sys.stdin", io.StringIO(stdin))
            patch.chdir(cwd or ".")
            capsys.readouterr()
            code = cli.main(line)
        return subprocess.CompletedProcess(line, code, *capsys.readouterr())

    return run


@pytest.fixture(scope="session")
def artifact(demo_artifact) -> Path:
    return demo_artifact


def error_of(done: subprocess.CompletedProcess) -> str:
    """The text of a user error, after checking its form: exit code 1, nothing on stdout, one line on stderr."""
    assert done.returncode == 1, done.stderr
    assert done.stdout == ""
    assert re.fullmatch(r"error: [^\n]+\n", done.stderr), done.stderr
    return done.stderr


# ---- what works


def test_verify_reads_the_weights(mlc_amd, artifact, tmp_path):
    damaged = shutil.copytree(artifact, tmp_path / "damaged")
    with open(damaged / "weights.safetensors", "r+b") as file:
        file.seek(-1000, os.SEEK_END)
        file.write(b"\xff" * 10)
    assert "weights.safetensors is corrupted" in error_of(mlc_amd("generate", damaged, "--prompt", "x", "--verify"))
    assert mlc_amd("generate", artifact, "--prompt", "x", "--max-tokens", 1, "--verify").returncode == 0


def test_compile_makes_a_folder_and_says_what_is_in_it(mlc_amd, tmp_path):
    write_gguf(synthetic("tiny:f16"), tmp_path / "small.gguf")
    done = mlc_amd("compile", "small.gguf", "--target", "vulkan", "--arch", "generic", "--ctx", 128, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    manifest = json.loads((tmp_path / "dist" / "small-vulkan-generic" / "manifest.json").read_text())
    assert (manifest["context"], manifest["target"]["kind"], list(manifest["formats"])) == (
        128,
        "vulkan",
        ["f16", "f32"],
    )
    for word in ("weights", "kernels", "launches", "decode", "KV cache", "time"):
        assert word in done.stdout
    assert "compiling" in done.stderr


def test_chat_answers_one_prompt_on_stdout_alone(mlc_amd, artifact):
    done = mlc_amd("chat", artifact, "--prompt", QUESTION, "--max-tokens", 40)
    assert done.returncode == 0, done.stderr
    assert "path" in done.stdout and done.stdout.endswith("\n")
    assert done.stderr == "(cut off: max_tokens is 40)\n"


def test_chat_without_a_model_compiles_the_bundled_one_once(mlc_amd, first_chat):
    first, caches = first_chat
    again = mlc_amd(*first.args[1:])
    assert first.returncode == again.returncode == 0, first.stderr
    assert "compiling llama-q4_k_m.gguf" in first.stderr and again.stderr == "(cut off: max_tokens is 8)\n"
    assert first.stdout == again.stdout != "\n"
    assert len(list((caches / "mlc-amd" / "models").glob("*/manifest.json"))) == 1


def test_piped_chat_answers_line_by_line_and_follows_commands(mlc_amd, artifact, tmp_path):
    saved = tmp_path / "talk.json"
    lines = (
        f'{QUESTION}\n"""\nAnd os.path.split?\n"""\n/stats\n/set temperature 0.5\n/save {saved}\n/exit\nnever asked\n'
    )
    done = mlc_amd("chat", artifact, "-n", 12, "--system", "Be brief.", stdin=lines)
    assert done.returncode == 0, done.stderr
    messages = json.loads(saved.read_text())["messages"]
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "user", "assistant"]
    assert messages[3]["content"] == "And os.path.split?"
    assert done.stdout == messages[2]["content"] + "\n" + messages[4]["content"] + "\n"
    cached = int(re.search(r"new \+ (\d+) cached", done.stderr)[1])
    assert cached > 20 and "temperature = 0.5" in done.stderr


def test_generate_continues_and_stops(mlc_amd, artifact):
    prompt = f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
    whole = mlc_amd("generate", artifact, "--prompt", prompt, "--max-tokens", 24)
    assert whole.returncode == 0 and whole.stderr == "", whole.stderr
    word = whole.stdout.split()[3]
    cut = mlc_amd(
        "generate", artifact, "--prompt", prompt, "--max-tokens", 24, "--stop", "no such text", "--stop", word
    )
    assert cut.stdout == whole.stdout[: whole.stdout.index(word)]


def test_generate_repeats_with_a_seed(mlc_amd, artifact):
    runs = [
        mlc_amd("generate", artifact, "-p", "import", "-n", 16, "--temperature", "1.5", "--seed", seed).stdout
        for seed in (1, 1, 2)
    ]
    assert runs[0] == runs[1] != runs[2]


def test_a_prompt_that_looks_like_python_stays_text(mlc_amd, artifact, demo_gguf):
    numbers = mlc_amd("tokenize", demo_gguf, "1e3", "--json")
    assert "".join(json.loads(numbers.stdout)["tokens"]) == "1e3"
    for text in ("123", "None", "[1, 2]", "--flag"):
        assert cli.main(["generate", str(artifact), f"--prompt={text}", "-n", "1"]) == 0


def test_tokenize_agrees_between_gguf_and_artifact(mlc_amd, artifact, demo_gguf, tmp_path):
    text = "<|im_start|>user\nGrüße, 你好 🙂!<|im_end|>"
    (tmp_path / "text").write_text(text, encoding="utf-8")
    of_gguf = mlc_amd("tokenize", demo_gguf, text, "--ids-only")
    of_artifact = mlc_amd("tokenize", artifact, "--file", tmp_path / "text", "--ids-only")
    assert of_gguf.returncode == 0 and of_gguf.stdout == of_artifact.stdout
    plain = mlc_amd("tokenize", demo_gguf, text, "--ids-only", "--no-special")
    assert len(plain.stdout.split()) > len(of_gguf.stdout.split())


def test_inspect_of_a_gguf_tells_its_tensors(mlc_amd, demo_gguf, artifact):
    report = json.loads(mlc_amd("inspect", demo_gguf, "--json").stdout)
    assert report["model"]["architecture"] == "llama" and report["model"]["layers"][0]["mixer"]["heads"] == 8
    assert sum(entry["bytes"] for entry in report["formats"].values()) < demo_gguf.stat().st_size
    compiled = json.loads(mlc_amd("inspect", artifact, "--json").stdout)
    assert report["formats"] == compiled["formats"]
    assert report["size"] == demo_gguf.stat().st_size and report["parameters"] == compiled["parameters"]
    assert report["quantization"] == compiled["quantization"] == "Q4_K_M"
    assert report["memory"]["weights"] == sum(t["bytes"] for t in compiled["tensors"])
    assert {key: report["memory"][key] for key in ("weights", "kv", "token", "context")}.items() <= (
        compiled["memory"].items()
    )
    assert abs(report["memory"]["buffers"] / compiled["memory"]["buffers"] - 1) < 0.4  # not compiled: estimated
    shown = mlc_amd("inspect", demo_gguf, "--tensors").stdout
    assert "blk.0.attn_q.weight" in shown and "sampling      greedy" in shown
    first = [line.split()[0] for line in shown.splitlines()[:7]]
    assert first == ["name", "size", "parameters", "quantization", "context", "memory", "fits"]
    assert "12.81 MiB on disk" in shown.splitlines()[1] and shown.splitlines()[3].split() == ["quantization", "Q4_K_M"]
    assert "--plan" in error_of(mlc_amd("inspect", demo_gguf, "--plan"))


def test_inspect_of_an_artifact_tells_its_plan(mlc_amd, artifact):
    report = json.loads(mlc_amd("inspect", artifact, "--json").stdout)
    assert report["context"] == 2048 and report["launches"]["decode"]["launches"] == len(report["plan"]["decode"])
    layers = [layer["mixer"] for layer in report["model"]["layers"]]
    assert report["memory"]["kv"] == sum(2 * a["kv_heads"] * a["head_dim"] * 2048 * 2 for a in layers)
    shown = mlc_amd("inspect", artifact, "--plan", "--kernels").stdout
    assert all(kernel["name"] in shown for kernel in report["kernels"])


def test_perplexity_of_text_and_of_ids_agree_and_logits_explain_it(mlc_amd, artifact, tmp_path):
    (tmp_path / "text").write_text("Return a new list that holds the items of the given sequence in sorted order. " * 4)
    by_text = mlc_amd(
        "perplexity", artifact, "--text", tmp_path / "text", "--tokens", 40, "--logits", tmp_path / "l.npz", "--json"
    )
    assert by_text.returncode == 0, by_text.stderr
    with np.load(tmp_path / "l.npz") as data:
        logits, ids = data["logits"].astype(np.float64), data["ids"]
    assert logits.shape[0] == len(ids) == 40
    nll = [
        np.log(np.exp(row - row.max()).sum()) + row.max() - row[following]
        for row, following in zip(logits, ids[1:], strict=False)
    ]
    result = json.loads(by_text.stdout)
    assert result["perplexity"] == pytest.approx(np.exp(np.mean(nll)), rel=1e-9)
    np.savez(tmp_path / "ids.npz", ids=ids)
    by_ids = mlc_amd("perplexity", artifact, "--ids", tmp_path / "ids.npz")
    assert by_ids.stdout.startswith(f"perplexity {result['perplexity']:.4f} ± ")


def test_perplexity_of_two_tokens_has_no_error(mlc_amd, artifact, tmp_path):
    """Of one prediction there is no deviation: none is shown, and JSON has null, not NaN."""
    (tmp_path / "text").write_text("Return a new list")
    command = ("perplexity", artifact, "--text", tmp_path / "text", "--tokens", "2")
    assert re.fullmatch(r"perplexity [\d.]+ over 2 tokens\n", mlc_amd(*command).stdout)
    found = json.loads(mlc_amd(*command, "--json").stdout, parse_constant=pytest.fail)
    assert found["error"] is None and found["perplexity"] > 0 and found["tokens"] == 2


def test_perplexity_matches_the_reference(mlc_amd, artifact, shared):
    expected = json.loads((shared / "refs" / "llama-q4_k_m.json").read_text())["summary"]["ppl_exact"]
    done = mlc_amd("perplexity", artifact, "--ids", shared / "refs" / "llama-q4_k_m.npz", "--json")
    assert json.loads(done.stdout)["perplexity"] == pytest.approx(expected, rel=0.01)


def test_doctor_finds_that_the_cpu_target_works(mlc_amd):
    done = mlc_amd("doctor", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["cpu_target"] is None and report["cpu"]["cores"] >= 1 and report["cpu"]["read_bytes_per_second"] > 1e8
    assert report["tvm"]["amdgpu"] and {check["status"] for check in report["checks"]} <= {"ok", "missing", "problem"}


# ---- help, errors


def test_overview_and_help_go_to_stdout_and_name_everything(mlc_amd):
    overview = mlc_amd("--help")
    assert overview.returncode == 0 and overview.stderr == ""
    assert mlc_amd().stdout == overview.stdout
    for verb in cli.VERBS:
        assert f"\n  {verb} " in overview.stdout
    page = mlc_amd("bench", "--help")
    assert page.returncode == 0 and page.stderr == "" and "-p, --n-prompt N,N,..." in page.stdout
    assert page.stdout == mlc_amd("help", "bench").stdout == mlc_amd("bench", "-p", "1", "-h").stdout


@pytest.mark.parametrize("verb", cli.VERBS)
def test_every_flag_of_every_verb_is_described(verb):
    module = __import__(cli.module_of(verb), fromlist=["run"])
    page, known = arguments.help_page(verb, module.run, getattr(module, "SHORT", {})), arguments.parameters(module.run)
    assert page.startswith(f"usage: mlc-amd {verb}")
    assert all(f"\n  {one.name.upper()} " in page or f" {one.spelling}" in page for one in known.values())


def test_help_imports_no_tvm():
    code = (
        "import sys; from mlc_amd.tools import cli; cli.main(['--help']); sys.exit('tvm' in sys.modules or 'numpy' in "
        "sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def test_bad_files_and_places_are_one_line(capsys, artifact, demo_gguf, tmp_path):
    def error(*tokens) -> str:
        assert cli.main(list(map(str, tokens))) == 1
        shown = capsys.readouterr()
        last = shown.err.splitlines(keepends=True)[-1]
        assert shown.out == "" and last.startswith("error: ") and (tokens[0] == "compile" or shown.err == last)
        return last

    junk = tmp_path / "junk.gguf"
    junk.write_bytes(b"not a model at all")
    assert "junk.gguf" in error("chat", junk, "--prompt", "x")
    assert "junk.gguf" in error("inspect", junk)
    assert "junk.gguf" in error("chat", tmp_path, "--prompt", "x")
    assert "unknown CPU arch" in error("compile", demo_gguf, "--arch", "znver99", "-o", tmp_path / "out")
    kept = tmp_path / "mine"
    kept.mkdir()
    (kept / "thesis.txt").write_text("precious")
    assert "not a compiled model" in error("compile", demo_gguf, "-o", kept)
    assert (kept / "thesis.txt").read_text() == "precious"
    assert "compiled with --ctx 2048" in error("chat", artifact, "--ctx", 1024, "--prompt", "x")
    assert "compiled with --target cpu" in error("chat", artifact, "--target", "rocm", "--arch", "gfx1100", "-p", "x")
    assert "compiled with --arch" in error("chat", artifact, "--arch", "x86-64-v1", "-p", "x")
    assert cli.main(["generate", str(artifact), "--ctx", "2000", "--target", "cpu", "-p", "x", "-n", "1"]) == 0
    capsys.readouterr()  # 2000 tokens take what 2048 take
    assert "no such file" in error("perplexity", artifact, "--text", tmp_path / "none")
    assert "not an .npz" in error("perplexity", artifact, "--ids", junk)


def test_an_unwritable_output_is_one_line(mlc_amd, demo_gguf):
    done = mlc_amd("compile", demo_gguf, "-o", "/proc/nowhere/model")
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.splitlines()[-1].startswith("error: ") and "Traceback" not in done.stderr


def test_debug_anywhere_shows_the_traceback(mlc_amd):
    for tokens in (("--debug", "chat", "/nowhere"), ("chat", "/nowhere", "--debug"), ("chat", "--debug", "/nowhere")):
        done = mlc_amd(*tokens)
        assert (
            done.returncode == 1 and "Traceback" in done.stderr and done.stderr.splitlines()[-1].startswith("error: ")
        )


def test_debug_shows_the_log(mlc_amd, artifact):
    line = ("generate", artifact, "--prompt", "Hello", "--max-tokens", "1")
    plain, debug = mlc_amd(*line), mlc_amd(*line, "--debug")
    assert plain.returncode == debug.returncode == 0 and plain.stdout == debug.stdout
    shown = [one for one in debug.stderr.splitlines() if one.startswith("debug [")]
    assert any(f"opens {artifact}: target cpu" in one for one in shown)
    assert not any(one.startswith("debug") for one in plain.stderr.splitlines())
    assert logging.getLogger("mlc_amd").level == logging.NOTSET and not logging.getLogger("mlc_amd").handlers


def test_a_bug_is_told_from_a_mistake(capsys, monkeypatch):
    monkeypatch.setattr(cli, "overview", lambda: 1 / 0)
    assert cli.main(["--help"]) == 70
    assert re.fullmatch(r"error: this is a bug in mlc-amd: ZeroDivisionError.*--debug.*\n", capsys.readouterr().err)


def test_a_full_disk_and_a_closed_pipe_are_quiet(home, artifact):
    command = f"{MLC_AMD} inspect {artifact} --tensors"
    full = subprocess.run(
        ["bash", "-c", f"{command} > /dev/full"], env=home, capture_output=True, text=True, check=False
    )
    assert full.returncode == 1 and re.fullmatch(r"error: [^\n]*disk is full[^\n]*\n", full.stderr)
    piped = subprocess.run(
        ["bash", "-o", "pipefail", "-c", f"{command} | true"], env=home, capture_output=True, text=True, check=False
    )
    assert piped.stderr == "" and piped.returncode in (0, 141)


@pytest.mark.parametrize("closed", ["<&-", "</dev/null >&-", "<&- >&- 2>&-"])
def test_closed_streams_are_empty_ones(home, artifact, closed):
    command = f"{MLC_AMD} chat {artifact} -n 1 {closed}"
    done = subprocess.run(["bash", "-c", command], env=home, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_ctrl_c_ends_a_command_with_130(home, artifact):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    # who starts tests in a shell's background has Ctrl-C ignored, and programs inherit that
    heed = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen([MLC_AMD, "chat", str(artifact)], env=home, preexec_fn=heed, **pipes)
    process.stdin.write(b"/stats\n")
    process.stdin.flush()
    assert b"no answer yet" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130 and out == b"" and err == b""


# ---- small parts


def test_likelihoods_are_exact_for_large_logits():
    logits = np.array([[1e4, 0.0], [0.0, 1e4], [5.0, 5.0]], dtype=np.float32)
    np.testing.assert_allclose(perplexity.negative_log_likelihoods(logits, np.array([0, 0, 1])), [0.0, 1e4, np.log(2)])


class Screen(io.StringIO):
    def isatty(self):
        return True


def test_a_model_cannot_steer_the_terminal(monkeypatch):
    text, clean = "\x1b[2Jclear\r\tkept\n\x9b31m\x07", "[2Jclear\tkept\n31m"
    for made, shown in ((io.StringIO, text), (Screen, clean)):
        monkeypatch.setattr("sys.stdout", made())
        with terminal.clean_output():
            terminal.stream(text)
            print(end=text)  # what is no answer: `inspect` through a pipe, say
        assert sys.stdout.getvalue() == shown + clean  # pyright: ignore[reportAttributeAccessIssue]


def test_names_cannot_steer_the_terminal(tmp_path, monkeypatch, capsys):
    """A model's name, and what an error quotes of a file."""
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "none\x1b]0;title\x07\n")
    writer.add_name("name\x1b[2J\x9b31m")
    writer.add_tensor("t\x1b[2J", np.zeros(32, np.float32))
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    for command in ("inspect", "compile"):
        screen = Screen()
        with monkeypatch.context() as patch:
            patch.setattr("sys.stdout", screen)
            cli.main([command, str(path)])
        shown = screen.getvalue() + capsys.readouterr().err
        assert "none" in shown and not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", shown)


def test_launches_per_layer_leave_out_the_ends():
    weights = ["token_embd", "blk.0.attn_norm", "blk.0.ffn", "blk.1.attn_norm", "blk.1.ffn", "output_norm", "output"]
    launches = [{"kernel": "k", "args": [["io", "state"], ["weight", f"{name}.weight"]]} for name in weights]
    assert inspect.per_layer(launches, 2) == 2
    assert inspect.per_layer(launches[:3] + launches[5:], 1) == 2
