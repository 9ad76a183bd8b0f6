"""The chat page in Chromium, against a server whose answers the test writes; skipped where playwright or Chromium is
not installed. And tiny encoders.
"""

from collections.abc import Callable

import pytest
from encoder_vocabularies import VOCABULARIES
from encoders import MODELS
from servers.page_browser import chromium, visits

from mlc_amd.compiler.gguf import synthetic
from mlc_amd.compiler.pipeline import compile_model
from mlc_amd.runtime.engine.encoder import Encoder
from mlc_amd.runtime.options import CompileOptions


@pytest.fixture(scope="module")
def browser():
    with chromium() as browser:
        yield browser


@pytest.fixture
def server(browser):
    from servers.scripted_server import ScriptedServer

    with ScriptedServer() as server:
        yield server


@pytest.fixture
def visit(browser, server):
    with visits(browser, server.address) as visit:
        yield visit


@pytest.fixture
def says(server):
    """says(fields of an Answer) has the server give that answer next."""
    from servers.scripted_server import ScriptedAnswer

    return lambda **fields: server.answers.append(ScriptedAnswer(**fields))


@pytest.fixture(scope="session")
def embedding_models(tmp_path_factory) -> dict[str, Callable[[], Encoder]]:
    """What loads tiny encoders with random weights: one with a vector of a text, with those of its tokens, a
    reranker."""
    folder = tmp_path_factory.mktemp("encoders")
    for name, model in (("emb", "bert"), ("none", "nomic-bert"), ("rank", "bert-rank")):
        architecture, keys, tensors = MODELS[model]
        keys = {"general.architecture": architecture} | keys | VOCABULARIES["bert"]
        source = synthetic("tiny-qwen2:f32", 0, keys, tensors, "none" if name == "none" else "")
        compile_model(source, folder / name, CompileOptions(target="cpu", arch="native", tuned="none"))
    return {name: lambda name=name: Encoder.load(folder / name) for name in ("emb", "none", "rank")}
