"""A bundle for CPUs, in a bare environment: a Python without packages, no TVM."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from encoder_vocabularies import VOCABULARIES
from encoders import MODELS
from image_cases import picture
from servers.serving import ServeClient, waiting

from mlc_amd.compiler.gguf import synthetic
from mlc_amd.compiler.pipeline import compile_model
from mlc_amd.runtime.engine.encoder import Encoder
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.folders import cache_directory
from mlc_amd.runtime.options import CompileOptions
from mlc_amd.tools.bundles import wheels
from mlc_amd.tools.commands import deploy

PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
GRAMMAR = ("--grammar", 'root ::= "yes" | "no"')
QUESTION = {"messages": [{"role": "user", "content": "What does os.path.join do?"}], "max_tokens": 8}
SCHEMA = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["a", 1]}}}}


def deployed(artifact: Path, out: Path) -> Path:
    """The bundle of an artifact; skips where wheels cannot be had."""
    names = (*deploy.PACKAGES, *deploy.SEEING_PACKAGES, *deploy.TARGET_PACKAGES["cpu"])
    try:
        wheels.fetch(names, [PYTHON], cache_directory() / "wheels")
    except UserError as error:
        pytest.skip(str(error))
    deploy.run(str(artifact), to="linux", output=str(out), python=PYTHON)
    return out


def started(bundle: Path, home: Path, *words: str | Path) -> dict:
    """Arguments of Popen: `start.py` with the interpreter alone."""
    python = Path(sys.base_prefix) / "bin" / f"python{PYTHON}"
    return {"args": [python, "-I", "-S", bundle / "start.py", *words], "env": {"HOME": str(home)}}


@pytest.fixture(scope="module")
def bundle(demo_artifact, tmp_path_factory) -> Path:
    return deployed(demo_artifact, tmp_path_factory.mktemp("deployed") / "demo")


@pytest.fixture
def command(bundle, tmp_path):
    """command(words) -> arguments of Popen, in an empty home."""
    return partial(started, bundle, tmp_path)


@pytest.fixture
def run(command, tmp_path):
    def ran(*words: str) -> str:
        done = subprocess.run(**command(*words), cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return ran


def test_commands_take_the_bundles_own_model(run, bundle, engine, tmp_path):
    (tmp_path / "text.txt").write_text("import os\n" * 10)
    ids = engine.tokenizer.encode("Hello there")
    assert run("tokenize", "Hello there", "--ids-only").split() == [str(token) for token in ids]
    assert json.loads(run("perplexity", "--text", "text.txt", "--json"))["tokens"] > 10
    assert run("chat", "--prompt", "Hello", *GRAMMAR).strip() in ("yes", "no")
    assert json.loads(run("doctor", "--json"))["tvm"] == {}
    assert not list(bundle.rglob("__pycache__")) and not (bundle / "lib" / "tvm").exists()
    assert "a CPU of the level" in (bundle / "README.md").read_text()


def test_an_encoder(bundle, tmp_path):  # bundle: there are wheels
    architecture, keys, tensors = MODELS["bert"]
    keys = {"general.architecture": architecture} | keys | VOCABULARIES["bert"]
    with synthetic("tiny-qwen2:f32", keys=keys, tensors=tensors) as model:
        compile_model(model, tmp_path / "model", CompileOptions(target="cpu", arch="native", tuned="none"))
    deploy.run(str(tmp_path / "model"), to="linux", output=str(tmp_path / "bundle"), python=PYTHON)
    assert "`./run.sh embed --file TEXTS`" in (tmp_path / "bundle" / "README.md").read_text()
    program = [Path(sys.base_prefix) / "bin" / f"python{PYTHON}", "-I", "-S", tmp_path / "bundle" / "start.py"]
    done = subprocess.run([*program, "embed", "--text", "hello world"], capture_output=True, text=True, check=True)
    with Encoder.load(tmp_path / "model") as encoder:
        expected = encoder.embed("hello world")[0]
    assert np.allclose(json.loads(done.stdout)["embedding"], expected, atol=1e-6)


def test_it_serves(command, tmp_path, engine):
    log = tmp_path / "log"
    with log.open("w") as file, subprocess.Popen(**command("serve", "--port", "0"), stdout=file, stderr=file) as server:
        try:
            assert waiting(lambda: "serving " in log.read_text() or server.poll() is not None), log.read_text()
            client = ServeClient(log.read_text().split(" at ")[-1].strip())
            assert [model["id"] for model in client.request("/v1/models")[2]["data"]] == ["model"]
            answer = client.post("/v1/chat/completions", QUESTION)["choices"][0]["message"]["content"]
            assert answer == engine.conversation().ask(QUESTION["messages"][0]["content"], max_tokens=8)
            answer = client.post("/v1/chat/completions", QUESTION | SCHEMA)["choices"][0]["message"]["content"]
            assert json.loads(answer) in ("a", 1)
            assert "<!doctype html>" in client.request("/")[2]
        finally:
            server.kill()


def test_a_model_that_sees(seeing, bundle, tmp_path):
    """It has Pillow, which others have not."""
    sees = deployed(seeing, tmp_path / "sees")
    words = ("generate", "--prompt", "<image> is", "-n", "4", "--temperature", "0", "--image")
    for kind in ("png", "jpeg", "webp", "gif"):
        picture(60, 40).save(tmp_path / f"a.{kind}")
        run = started(sees, tmp_path, *words, tmp_path / f"a.{kind}")
        done = subprocess.run(**run, capture_output=True, timeout=600, check=False)
        assert done.returncode == 0 and done.stdout, done.stderr
    assert (sees / "lib" / "PIL").is_dir() and not (bundle / "lib" / "PIL").exists()
