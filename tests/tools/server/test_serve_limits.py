"""Who may use a server, how much, and until when: keys, limits, clients that go away, models on demand, signals."""

import gzip
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, closing
from pathlib import Path
from urllib.parse import urlsplit

import pytest

pytest.importorskip("starlette")
from servers.serving import Served, serving, started, waiting

from mlc_amd.runtime.engine.engine import Engine
from mlc_amd.runtime.engine.sampled_rows import SampledRows
from mlc_amd.runtime.errors import UsageError, UserError
from mlc_amd.runtime.options import RunOptions
from mlc_amd.tools.commands import serve
from mlc_amd.tools.server import errors, lifecycle, middleware
from mlc_amd.tools.server.app import ROUTES
from mlc_amd.tools.server.library import Library
from mlc_amd.tools.server.options import ServeOptions

TEXT = "/v1/completions"
LONG = {"prompt": "def f(", "max_tokens": 1900, "logit_bias": {"8189": -1000, "8191": -1000}}


@pytest.fixture(scope="module")
def library(demo_artifact):
    """Two names for the bundled model, one of which can be loaded at a time."""

    def make(**settings) -> Library:
        def load() -> Engine:
            return Engine.load(demo_artifact, RunOptions(threads=1))

        return Library({"one": load, "two": load}, **settings)

    return make


def test_keys(library):
    with serving(library(), api_key=("first", "second")) as served:
        models = "/v1/models"
        for headers in ({}, {"authorization": "Bearer third"}, {"x-api-key": "firs"}, {"authorization": "first"}):
            status, found, answer = served.request(models, headers=headers)
            assert status == 401 and found["www-authenticate"] and answer["error"]["code"] == "invalid_api_key"
        assert all(served.request(path)[0] == 401 for path, *_ in ROUTES if path != "/health")
        for headers in ({"authorization": "Bearer first"}, {"x-api-key": "second"}):
            assert served.request(models, headers=headers)[0] == 200
        assert served.request("/health")[0] == 200 and served.request("/metrics")[0] == 401
        assert served.request("/v1/messages", {})[2]["type"] == "error"
        assert isinstance(served.request("/api/tags")[2]["error"], str)


def test_browsers(library):
    with serving(library(), cors_origins=("https://ours.example",)) as served:

        def status(**headers: str) -> int:
            return served.request("/v1/models", headers=headers)[0]

        assert status() == status(origin=served.url) == status(origin="https://ours.example") == 200
        assert status(origin="http://[") == status(host="[") == 400
        assert status(origin="https://evil.example") == status(host="evil.example") == 403
        assert status(host="localhost:1") == 200
        found = served.request("/v1/models", headers={"origin": "https://ours.example"})[1]
        assert found["access-control-allow-origin"] == "https://ours.example"


def test_sizes_and_times(library, monkeypatch):
    """Each limit at a server that has no other short one, which a slow machine might meet first."""

    def answer_to(sent: bytes) -> bytes:
        where = urlsplit(served.url)
        assert where.hostname and where.port
        with socket.create_connection((where.hostname, where.port), 120) as connection:
            connection.sendall(sent)
            return connection.recv(100)  # b"": closed by the server

    with serving(library(), max_body=1, timeout=0.2) as served:
        assert served.request(TEXT, {"prompt": "x" * (1 << 20)})[0] == 413
        assert served.request(TEXT, LONG)[0] == 504
        assert "timeout_error" in served.post(TEXT, LONG | {"stream": True})
    with serving(library(), body_timeout=0.3) as served:
        post = b"POST %s HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 99\r\n\r\n{" % TEXT.encode()
        assert answer_to(post).startswith(b"HTTP/1.1 408")
    monkeypatch.setattr(lifecycle, "IDLE_CONNECTION", 0.3)
    with serving(library()) as served:
        assert answer_to(b"") == answer_to(b"GET /health HTTP/1.1\r\nHost: x\r\nX-Slow: ") == b""


def test_answers_are_not_held_back(library):
    """By Nagle's algorithm, which waits 40 ms for a client's acknowledgement."""
    with serving(library()) as served, closing(http.client.HTTPConnection(urlsplit(served.url).netloc)) as connection:
        times = []
        for _ in range(40):
            begun = time.perf_counter()
            connection.request("GET", "/v1/models")
            assert connection.getresponse().read()
            times.append(time.perf_counter() - begun)
        # each of the later ones would wait, for the first ones TCP acknowledges at once; a slow machine delays some
        assert min(times[20:]) < 0.03


def test_too_many_requests(library):
    with serving(library(), max_requests=1) as served, closing(served.begin(TEXT, LONG)[0]):
        status, headers, answer = served.request(TEXT, LONG)
        assert (status, answer["error"]["type"]) == (503, "overloaded_error") and int(headers["retry-after"]) > 0
        assert served.request("/health")[0] == 200


def test_a_client_that_goes_away_ends_its_answer(library):
    with serving(library()) as served:
        connection, _ = served.begin(TEXT, LONG)
        model = served.service.library.loaded["one"]
        assert model.engine.queue.running == 1 and model.users == 1
        assert connection.sock
        connection.sock.shutdown(socket.SHUT_RDWR)
        connection.close()
        assert waiting(lambda: not model.engine.queue.running and not model.users)
        assert model.engine.last.generated < LONG["max_tokens"]
        assert 'finished_reason="abort"' in served.request("/metrics")[2]


def test_models_are_loaded_on_demand(library):
    with serving(library(patience=0.3)) as served:
        loaded = served.service.library.loaded
        assert not loaded
        short = {"prompt": "x", "max_tokens": 1}
        served.post(TEXT, short)
        assert list(loaded) == ["one"]
        served.post(TEXT, short | {"model": "TWO"})
        assert list(loaded) == ["two"]
        with closing(served.begin(TEXT, LONG | {"model": "two"})[0]):
            status, headers, _ = served.request(TEXT, short | {"model": "one"})
            assert status == 503 and headers["retry-after"] and list(loaded) == ["two"]
        model = loaded["two"]
        assert waiting(lambda: not model.users)
        served.post(TEXT, short)
        assert list(loaded) == ["one"]
        # An answer arrives a moment before the step that ended it is over.
        idle = 'vllm:num_requests_running{model_name="one"} 0.0'
        assert waiting(lambda: idle in served.request("/metrics")[2])
        usage = served.request("/metrics")[2]
        assert 'vllm:time_to_first_token_seconds_count{model_name="one"} 2.0' in usage


def test_unused_models_are_unloaded(library):
    with serving(library(idle=0.1)) as served:
        loaded = served.service.library.loaded
        with closing(served.begin(TEXT, LONG)[0]):
            time.sleep(0.3)
            assert list(loaded) == ["one"]
        assert waiting(lambda: not loaded)
        served.post(TEXT, {"prompt": "x", "max_tokens": 1})
        assert waiting(lambda: not loaded)


def test_a_model_that_cannot_be_loaded():
    def load() -> Engine:
        raise UserError("its file is damaged")

    with serving(Library({"broken": load})) as served:
        for _ in range(2):
            status, _, answer = served.request(TEXT, {"prompt": "x"})
            assert status == 500 and "its file is damaged" in answer["error"]["message"]


def test_a_model_that_fails(library, monkeypatch):
    """A logit that is no number is the server's error, in the form of each API."""
    read = SampledRows.read

    def damaged(rows, wanted, choices):
        return [one._replace(token=-1) for one in read(rows, wanted, choices)]

    monkeypatch.setattr(SampledRows, "read", damaged)
    message = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    with serving(library()) as served:
        for path in (TEXT, "/v1/chat/completions", "/v1/messages", "/api/chat", "/completion"):
            body = message | {"prompt": "x"}
            status, _, answer = served.request(path, body | {"stream": False})
            assert status == 500 and "not a finite number" in json.dumps(answer)
            assert answer == errors.body_for(path, errors.ApiError(500, errors_message(answer)))
            status, _, text = served.request(path, body | {"stream": True})
            assert status == 200 and "not a finite number" in text


def errors_message(answer: dict) -> str:
    found = answer["error"]
    return found if isinstance(found, str) else found["message"]


def test_requests_while_the_first_model_is_loaded(library):
    models, gate = library(), threading.Event()
    with serving(models, lambda: gate.wait(120) and models.add("one", models._loaders["one"]())) as served:
        status, headers, answer = served.request("/health")
        assert (status, answer) == (503, {"status": "loading model"}) and int(headers["retry-after"]) > 0
        for path, method, _ in ROUTES[1:]:
            status, headers, answer = served.request(path, {} if method == "POST" else None)
            assert (status, answer) == (503, errors.body_for(path, errors.loading())) and int(
                headers["retry-after"]
            ) > 0
        gate.set()
        assert waiting(lambda: served.request("/health")[0] == 200)
        served.post(TEXT, {"prompt": "x", "max_tokens": 1})


def test_a_first_model_that_cannot_be_loaded_ends_the_server(tmp_path):
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(b"GGUF")
    command = [Path(sys.executable).with_name("mlc-amd"), "serve", damaged, "--port", "0", "--target", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: ") and "damaged.gguf" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_server_that_loads(tmp_path, number):
    os.mkfifo(tmp_path / "m.gguf")  # reading waits for a writer
    command = [Path(sys.executable).with_name("mlc-amd"), "serve", "m.gguf", "--uds", "socket", "--target", "cpu"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        try:
            assert process.stderr and "loading m" in process.stderr.readline()
            with socket.socket(socket.AF_UNIX) as client:
                assert waiting(lambda: client.connect_ex(str(tmp_path / "socket")) == 0)
                client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                assert client.recv(12) == b"HTTP/1.1 503"
            process.send_signal(number)
            assert process.wait(120) == 0 and not (tmp_path / "socket").exists()
        finally:
            process.kill()


@pytest.fixture
def process(demo_artifact, tmp_path):
    """process(arguments) -> a server in a process of its own."""
    with ExitStack() as running:
        yield lambda *arguments: running.enter_context(
            started(demo_artifact, "--kv-tokens", "4096", *arguments, log=tmp_path / "log")
        )


def test_the_first_signal_lets_answers_finish(process):
    served = process()
    results = []
    body = LONG | {"max_tokens": 400}
    asking = threading.Thread(target=lambda: results.append(served.request(TEXT, body)))
    asking.start()
    assert waiting(lambda: _running(served) == 1)
    served.process.send_signal(signal.SIGTERM)
    assert waiting(lambda: "stopping after" in served.log.read_text())
    assert served.request(TEXT, body)[0] == served.request("/health")[0] == 503
    asking.join(60)
    assert results[0][0] == 200 and results[0][2]["usage"]["completion_tokens"] == 400
    assert served.process.wait(60) == 0, served.log.read_text()
    assert f"POST {TEXT} 200" in served.log.read_text()


def _running(served: Served) -> float:
    lines = served.request("/metrics")[2].splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running{"))


def test_the_second_signal_ends_it_at_once(process):
    served = process("--quiet")
    with closing(served.begin(TEXT, LONG)[0]):
        served.process.send_signal(signal.SIGINT)
        assert waiting(lambda: "stopping after" in served.log.read_text())
        served.process.send_signal(signal.SIGINT)
        assert served.process.wait(60) == 128 + signal.SIGINT


def test_arguments(tmp_path, monkeypatch):
    keys = tmp_path / "keys"
    keys.write_text("# of the team\nalpha\n\n beta \n")
    monkeypatch.setenv("MLC_AMD_API_KEY", "gamma")
    assert serve.read_keys(("alpha",), str(keys)) == ("alpha", "beta", "gamma")
    with pytest.raises(UsageError, match="no keys"):
        keys.write_text("\n")
        serve.read_keys((), str(keys))
    path = tmp_path / "model.gguf"
    path.touch()
    found = serve.named((str(path), f"mine={path}", "owner/repo:Q8_0"))
    assert found == {"model": str(path), "mine": str(path), "owner/repo:Q8_0": "owner/repo:Q8_0"}
    with pytest.raises(UsageError, match="two models"):
        serve.named((str(path), str(path)))
    local = {host: ServeOptions(host=host).local for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "example")}
    assert [host for host, is_local in local.items() if is_local] == ["127.0.0.1", "::1", "localhost"]
    with closing(serve.listen("127.0.0.1", 0, None)) as taken:
        taken.listen()
        with pytest.raises(UserError, match="in use; choose another with --port"):
            serve.listen("127.0.0.1", taken.getsockname()[1], None)
    for host in ("192.0.2.1", "no.such.name.invalid"):
        with pytest.raises(UserError, match=f"{host} is no address of this machine; give --host 127.0.0.1"):
            serve.listen(host, 0, None)
    with pytest.raises(UserError, match="choose another file with --uds"):
        serve.listen("", 0, str(tmp_path / "nowhere" / "socket"))
    local = tmp_path / "socket"
    with closing(serve.listen("", 0, str(local))):
        assert local.stat().st_mode & 0o777 == 0o600


def test_the_limit_of_open_files_is_raised_and_a_small_one_is_told():
    program = (
        "from mlc_amd.tools.server.lifecycle import allow_connections, resource; allow_connections(256); "
        "print(resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    for most, warning in ((1000, False), (300, True)):
        command = ["bash", "-c", f'ulimit -Sn 100; ulimit -Hn {most}; exec {sys.executable} -c "{program}"']
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stdout == f"({most}, {most})\n"
        assert warning == (f"may open {most} files, too few for 256 requests" in done.stderr) == bool(done.stderr)


def test_encoded_bodies(served):
    body, headers = json.dumps({"prompt": "x", "max_tokens": 1}).encode(), {"content-encoding": "gzip"}
    assert served.request(TEXT, gzip.compress(body), headers)[0] == 200
    sent = [(gzip.compress(b" " * (17 << 20)), 413), (gzip.compress(body)[:-4], 400), (body, 400)]
    assert [served.request(TEXT, data, headers)[0] for data, _ in sent] == [status for _, status in sent]
    assert served.request(TEXT, body, {"content-encoding": "br"})[0] == 415


def test_unknown_paths(served):
    for path in ("/" + "a" * 5000, "/a%00", "/completion/%2e%2e"):
        for body in (None, {}):
            status, _, answer = served.request(path, body)
            assert status == 404 and len(answer["error"]["message"]) < 200
    for path, body, status in (("/fill", {}, 404), ("/nothing", None, 404), ("/health", {}, 405), (TEXT, None, 405)):
        found, headers, _ = served.request(path, body)
        assert found == status and ("allow" in headers) == (status == 405)


def test_every_route_but_health_wants_a_key():
    paths = [path for path, *_ in ROUTES]
    assert [path for path in paths if not path.startswith(middleware.keyed(paths))] == ["/health"]
