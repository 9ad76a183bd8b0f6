"""Shared fixtures: where the optional reference data lies, the bundled model, and models compiled once for all tests."""

from pathlib import Path

import pytest

from mlc_amd.compiler.gguf import GGUFModel, synthetic
from mlc_amd.compiler.pipeline import compile_model
from mlc_amd.tools import cli

REPO = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of reference models and logits beside the repository; tests that need it skip where it is absent."""
    path = REPO.parent / "shared"
    if not (path / "refs").is_dir():
        pytest.skip("reference data (../shared) is not here")
    return path


@pytest.fixture(scope="session")
def demo_gguf() -> Path:
    return REPO / "dist" / "demo" / "llama-q4_k_m.gguf"


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    """compiled(GGUF path or synthetic spec, ctx) -> artifact folder; each is compiled once a session. Not to be changed by tests."""
    made = {}

    def compile_once(source: Path | str, ctx: int) -> Path:
        if (source, ctx) not in made:
            out = tmp_path_factory.mktemp("artifacts") / "model"
            with GGUFModel.open(source) if isinstance(source, Path) else synthetic(source) as model:
                compile_model(model, "cpu", "native", ctx, out)
            made[source, ctx] = out
        return made[source, ctx]

    return compile_once


@pytest.fixture(scope="session")
def demo_artifact(compiled, demo_gguf) -> Path:
    """The bundled model with its whole context, 2048 tokens."""
    return compiled(demo_gguf, 2048)


@pytest.fixture
def inspect(capsys):
    """inspect(arguments) -> (stdout, stderr) of a command that succeeds."""

    def run(*tokens):
        assert cli.main(["inspect", *map(str, tokens)]) == 0
        return capsys.readouterr()

    return run
