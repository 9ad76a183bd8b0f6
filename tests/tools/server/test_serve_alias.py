"""`serve --alias NAME`: all APIs list and accept that name, and no other."""

import pytest
from servers.serving import started

from mlc_amd.tools.commands import serve

QUESTION = [{"role": "user", "content": "Hello"}]
CHAT = {"messages": QUESTION, "max_tokens": 2}
REQUESTS = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "Hello", "max_tokens": 2},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 16},
    "/v1/messages": CHAT,
    "/v1/messages/count_tokens": {"messages": QUESTION},
    "/api/chat": {"messages": QUESTION, "stream": False, "options": {"num_predict": 2}},
    "/api/generate": {"prompt": "Hello", "stream": False, "options": {"num_predict": 2}},
    "/api/show": {},
    "/completion": {"prompt": "Hello", "n_predict": 2},
}


@pytest.fixture(scope="module")
def server(demo_artifact, tmp_path_factory):
    with started(demo_artifact, "--alias", "my-model", log=tmp_path_factory.mktemp("alias") / "log") as found:
        yield found


def test_it_is_listed(server):
    _, _, models = server.request("/v1/models")
    assert [model["id"] for model in models["data"]] == ["my-model"]
    for path in ("/api/tags", "/api/ps"):
        assert [model["name"].removesuffix(":latest") for model in server.request(path)[2]["models"]] == ["my-model"]
    assert server.request("/props")[2]["model_alias"] == "my-model"
    assert 'model_name="my-model"' in server.request("/metrics")[2]
    assert "serving my-model at" in server.log.read_text()


@pytest.mark.parametrize("path", REQUESTS)
def test_requests_name_it(server, path):
    answer = server.post(path, REQUESTS[path] | {"model": "my-model"})
    assert answer.get("model", "my-model") == "my-model"
    status, _, answer = server.request(path, REQUESTS[path] | {"model": "another"})
    assert status == 404 and "another" in str(answer) and "my-model" in str(answer)


def test_it_replaces_other_names():
    for given in ((), ("model.gguf",), ("other=model.gguf",)):
        assert serve.named(given, "x") == {"x": "model.gguf" if given else None}
