"""The server on a Ray cluster of two nodes: the same APIs, answers where their prompts are cached, replicas that die,
and an end without losses."""

import base64
import http.client
import io
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import numpy as np
import pytest

# A token of this cluster's own, whether or not the user has one for others. Ray reads it when it is imported.
os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": uuid.uuid4().hex}
pytest.importorskip("starlette")
pytest.importorskip("ray.serve")
import ray
from image_cases import picture
from ray.cluster_utils import Cluster
from ray.exceptions import RaySystemError
from servers.serving import ServeProcess, started, waiting

from mlc_amd.runtime.cache.pages import PAGE
from mlc_amd.runtime.options import LoadOptions
from mlc_amd.tools import cli
from mlc_amd.tools.hub import models
from mlc_amd.tools.server import ray_cluster
from mlc_amd.tools.server.ray_cluster import gpus_each, most_each

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
LONG = {"prompt": "def f(", "max_tokens": 1900, "logit_bias": {"8189": -1000, "8191": -1000}}
# In the environment of all processes of this run's cluster: there may be others on this machine.
MARK = "MLC_AMD_TEST_CLUSTER"


@dataclass
class Deployed(ServeProcess):
    """The command that deploys a server."""

    def by_replica(self, metric: str) -> dict[str, float]:
        """The sum of a metric's values for each replica."""
        found: dict[str, float] = {}
        for line in self.request("/metrics")[2].splitlines():
            if line.startswith(f"{metric}{{"):
                name = line.split('replica="')[1].split('"')[0]
                found[name] = found.get(name, 0) + float(line.split()[-1])
        return found

    def running(self) -> float:
        return sum(self.by_replica("vllm:num_requests_running").values())


def free_port() -> int:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        return listener.getsockname()[1]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    # pytest's folders are too long for the names of sockets
    with (
        tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder,
        pytest.MonkeyPatch.context() as environment,
    ):
        environment.setenv(MARK, uuid.uuid4().hex)
        environment.setenv("RAY_USAGE_STATS_ENABLED", "0")
        environment.setenv("RAY_TMPDIR", folder)
        environment.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
        found = Cluster(initialize_head=True, head_node_args={"include_dashboard": False})  # nodes have one CPU each
        try:
            found.add_node()
            yield found
        finally:
            found.shutdown()


@pytest.fixture(scope="module")
def deployed(cluster, demo_artifact, tmp_path_factory) -> Iterator[Deployed]:
    log, port = tmp_path_factory.mktemp("ray") / "log", free_port()
    replicas = ("--ray", cluster.address, "--replicas", "2", "--port", str(port))
    with started(f"demo={demo_artifact}", "--kv-tokens", "4096", *replicas, log=log) as found:
        assert f"serving demo with 2 replicas at http://127.0.0.1:{port}\n" in log.read_text(), log.read_text()
        yield Deployed(f"http://127.0.0.1:{port}", found.process, log)


def replica_processes() -> list[int]:
    found = []
    for folder in Path("/proc").iterdir():
        try:
            ours = f"{MARK}={os.environ[MARK]}".encode() in (folder / "environ").read_bytes()
            if ours and (folder / "cmdline").read_text().startswith("ray::ServeReplica:mlc-amd:Replica"):
                found.append(int(folder.name))
        except OSError:  # it is no process, has ended, or is not ours
            continue
    return found


def test_the_apis_are_the_same(deployed):
    assert [model["id"] for model in deployed.request("/v1/models")[2]["data"]] == ["demo"]
    assert deployed.post("/tokenize", {"content": "def f(x):"})["tokens"]
    assert "<!doctype html>" in deployed.request("/")[2]
    assert deployed.request("/health")[2] == {"status": "ok"}
    asked = {"messages": [{"role": "user", "content": "What does os.path.join do?"}], "max_tokens": 32}
    whole = deployed.post(CHAT, asked)["choices"][0]
    chunks = [chunk["choices"][0] for chunk in deployed.stream(CHAT, asked) if chunk["choices"]]
    assert "".join(chunk["delta"].get("content") or "" for chunk in chunks) == whole["message"]["content"] != ""
    assert chunks[-1]["finish_reason"] == whole["finish_reason"]
    for wrong in ({"messages": 3}, b"{", b"\xff"):
        status, _, answer = deployed.request(CHAT, wrong)
        assert status == 400 and answer["error"]["type"] == "invalid_request_error"
    status, _, answer = deployed.request(TEXT, b" " * (17 << 20))
    assert status == 413 and "limit" in answer["error"]["message"]
    assert deployed.request("/v1/models", headers={"host": "evil.example"})[0] == 403
    assert len(deployed.by_replica("mlc_amd:model_loaded")) == 2


def test_an_answer_streams(deployed):
    connection, answer = deployed.begin(TEXT, LONG)
    with closing(connection):
        assert deployed.running() == 1  # its first tokens are here already
        assert b"[DONE]" in answer.read()


def test_conversations_stay_where_they_are_cached(deployed):
    before = deployed.by_replica("vllm:prompt_tokens_total")
    talks = [
        [{"role": "user", "content": f"{i} is a question about os.path.join. " * 8}] for i in range(3)
    ]  # taking turns would divide them
    lengths = [0] * len(talks)
    for turn in range(3):
        for i, talk in enumerate(talks):
            answer = deployed.post(CHAT, {"messages": talk, "max_tokens": 8})
            usage, message = answer["usage"], answer["choices"][0]["message"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            assert cached >= lengths[i] // PAGE * PAGE, f"turn {turn} of conversation {i}: {usage}"
            lengths[i] = usage["prompt_tokens"]
            talk += [{"role": "assistant", "content": message["content"]}, {"role": "user", "content": "And then?"}]
    after = deployed.by_replica("vllm:prompt_tokens_total")
    given = [after[name] - before.get(name, 0) for name in after]
    assert min(given) > sum(given) / 4, "one conversation, and two"


def test_responses_are_continued_where_they_are_stored(deployed):
    def ask(**more) -> str:
        return deployed.post("/v1/responses", {"input": "Hello", "max_output_tokens": 4, **more})["id"]

    firsts = [ask() for _ in range(4)]
    assert len({id[:13] for id in firsts}) == 2  # resp_ and the replica's name
    for id in firsts:
        assert ask(previous_response_id=id)[:13] == id[:13]
        assert deployed.request(f"/v1/responses/{id}")[2]["id"] == id
    assert deployed.request("/v1/responses/resp_none")[0] == 404


def test_a_client_that_goes_away_ends_its_answer(deployed):
    def aborted() -> int:
        return deployed.request("/metrics")[2].count('finished_reason="abort"')

    for stream in (True, False):
        before = aborted()
        connection = http.client.HTTPConnection(urlsplit(deployed.url).netloc, timeout=60)
        connection.request("POST", TEXT, json.dumps(LONG | {"stream": stream}))
        assert waiting(lambda: deployed.running() == 1)
        assert connection.sock
        connection.sock.shutdown(socket.SHUT_RDWR)
        connection.close()
        assert waiting(lambda: not deployed.running(), 2)
        assert aborted() >= max(before, 1)


def test_a_replica_that_dies_loses_its_own_answers_alone(deployed):
    assert waiting(lambda: len(replica_processes()) == 2)
    dying, names = replica_processes()[0], set(deployed.by_replica("mlc_amd:model_loaded"))
    streams = [deployed.begin(TEXT, LONG) for _ in range(2)]
    assert sorted(deployed.by_replica("vllm:num_requests_running").values()) == [1, 1]
    os.kill(dying, signal.SIGKILL)
    ends = []
    for connection, answer in streams:
        with closing(connection):
            try:
                ends.append(b"[DONE]" in answer.read())
            except http.client.IncompleteRead:
                ends.append(None)
    assert sorted(ends, key=str) == [None, True]
    assert deployed.request(TEXT, {"prompt": "x", "max_tokens": 1})[0] == 200
    assert waiting(lambda: len(deployed.by_replica("mlc_amd:model_loaded")) == 2 and len(replica_processes()) == 2)
    assert len(names & set(deployed.by_replica("mlc_amd:model_loaded"))) == 1
    for _ in range(4):
        assert deployed.request(TEXT, {"prompt": "x", "max_tokens": 1})[0] == 200


def test_a_signal_lets_answers_finish_and_deletes_the_application(deployed):
    """The last test of this deployment."""
    results = []
    asking = [threading.Thread(target=lambda: results.append(deployed.request(TEXT, LONG))) for _ in range(2)]
    for thread in asking:
        thread.start()
    assert waiting(lambda: deployed.running() == 2)
    deployed.process.send_signal(signal.SIGTERM)
    assert waiting(lambda: "stopping after 2 requests" in deployed.log.read_text()), deployed.log.read_text()
    status, headers, answer = deployed.request(TEXT, LONG)
    assert status == 503 and "stopping" in answer["error"]["message"] and headers["retry-after"]
    for thread in asking:
        thread.join(60)
    assert [(status, body["usage"]["completion_tokens"]) for status, _, body in results] == [(200, 1900)] * 2
    assert deployed.process.wait(60) == 0, deployed.log.read_text()
    assert deployed.log.read_text().endswith("stopping after 2 requests (once more: at once)\n")  # and nothing of Ray's
    assert waiting(lambda: not replica_processes())
    with pytest.raises(OSError):
        deployed.request("/health")


def test_images(cluster, seeing, tmp_path):
    """Each conversation stays with the replica that has its image cached."""
    port = free_port()
    replicas = ("--ray", cluster.address, "--replicas", "2", "--port", str(port))
    with started(f"sees={seeing}", "--kv-tokens", "4096", *replicas, log=tmp_path / "log") as found:
        client = Deployed(f"http://127.0.0.1:{port}", found.process, found.log)
        files = [io.BytesIO() for _ in range(4)]
        for side, file in enumerate(files, 60):
            picture(side, side).save(file, "PNG")
        urls = [f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}" for file in files]
        for turn in range(3):
            for url in urls:
                content = [
                    {"type": "image_url", "image_url": {"url": url}},
                    {"type": "text", "text": "abc " * 40 * (turn + 1)},
                ]
                asked = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
                cached = client.post(CHAT, asked)["usage"]["prompt_tokens_details"]["cached_tokens"]
                assert cached >= 2 * PAGE * (turn > 0)
        assert min(client.by_replica("vllm:prompt_tokens_total").values()) > 0
        (model,) = client.request("/v1/models")[2]["data"]
        assert model["architecture"]["input_modalities"] == ["text", "image"]
        found.process.send_signal(signal.SIGTERM)
        assert found.process.wait(120) == 0


def test_an_encoder(cluster, embedding_models, tmp_path):
    """Vectors and scores are those of this process."""
    texts, queries = ["hello world", "Embeddings of texts"], {"query": "hello", "documents": ["hello world", "texts"]}
    with embedding_models["emb"]() as emb, embedding_models["rank"]() as rank:
        artifacts = [f"{name}={one.artifact.path}" for name, one in (("emb", emb), ("rank", rank))]
        vectors, scores = emb.embed(texts), rank.rerank(queries["query"], queries["documents"])
    replicas = ("--ray", cluster.address, "--replicas", "2", "--port", str(free_port()))
    with started(*artifacts, *replicas, log=tmp_path / "log") as found:
        server = Deployed(f"http://127.0.0.1:{replicas[-1]}", found.process, tmp_path / "log")
        for _ in range(4):  # of either replica
            answer = server.post("/v1/embeddings", {"model": "emb", "input": texts})
            assert np.allclose([one["embedding"] for one in answer["data"]], vectors, atol=1e-6)
            ranked = server.post("/v1/rerank", {"model": "rank", **queries})["results"]
            assert np.allclose([one["relevance_score"] for one in ranked], sorted(scores, reverse=True), atol=1e-5)


def test_a_model_that_is_not_there(cluster, capsys):
    assert cli.main(["serve", "nowhere.gguf", "--ray", cluster.address, "--port", str(free_port())]) == 1
    error = next(line for line in capsys.readouterr().err.splitlines() if line.startswith("error: "))
    assert "the replicas cannot be started: nowhere.gguf: no such file" in error
    assert not replica_processes()


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["--ray", "127.0.0.1:1"], 1, "no Ray cluster at 127.0.0.1:1: Connection refused"),
        (["--ray", "ray://127.0.0.1:1"], 1, "no Ray cluster at ray://127.0.0.1:1: Connection refused"),
        (["--ray", "a..b:1"], 1, "no Ray cluster at a..b:1: "),
        (["--ray", "cluster"], 2, "give auto, local, HOST:PORT or ray://HOST:PORT"),
        (["--ray", "auto", "--replicas", "0"], 2, "--replicas is 0: it must be at least 1"),
        (["--replicas", "2"], 2, "--replicas is for --ray"),
        (["--ray", "auto", "--uds", "socket"], 2, "--ray needs a --port"),
        (["--ray", "auto", "--port", "0"], 2, "--ray needs a --port"),
    ],
)
def test_what_is_wrong_is_told_in_one_line(capsys, flags, code, message):
    assert cli.main(["serve", *flags]) == code
    said = capsys.readouterr()
    assert message in said.err and said.err.count("\n") == 1 and not said.out


@pytest.mark.parametrize("error", [Exception, TimeoutError, PermissionError, RaySystemError])
def test_ray_that_does_not_start(monkeypatch, capsys, error):
    def fails(*_, **__):
        raise error("The current node timed out during startup.\nmore")

    monkeypatch.setattr(ray, "init", fails)
    assert cli.main(["serve", "--ray", "local", "--port", str(free_port())]) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: Ray does not start on this machine: ") and "timed out during startup (if" in said
    assert "try again; Ray's logs are in /" in said and said.count("\n") == 1


def test_a_cluster_that_fails(cluster, monkeypatch, capsys):
    def fails():
        raise RaySystemError("the head is gone")

    monkeypatch.setattr(ray, "nodes", fails)
    assert cli.main(["serve", "--ray", cluster.address, "--port", str(free_port())]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert any(line.startswith("error: the Ray cluster fails: ") and "the head is gone" in line for line in lines)


def test_an_interrupt_ends_replicas_that_load(cluster, tmp_path):
    """Their model is compiled, which takes far longer than this may."""
    model = tmp_path / "model.gguf"
    model.symlink_to(models.default_model())
    log = tmp_path / "log"
    with (
        log.open("w") as out,
        subprocess.Popen(
            [sys.executable, "-c", "import sys; from mlc_amd.tools.start import main; sys.exit(main())", "serve", model,
             "--ray", cluster.address, "--target", "cpu", "--arch", "x86-64-v2", "--port", str(free_port())],
            stdout=out, stderr=out,
        ) as process,
    ):  # fmt: skip
        assert waiting(replica_processes)
        loading = time.perf_counter()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130, log.read_text()
    assert waiting(lambda: not replica_processes())
    said = log.read_text()
    assert "Traceback" not in said and "may be left" not in said, said
    assert time.perf_counter() - loading < 60


def test_cpus_are_shared():
    assert most_each([1, 1], 2) == 1 and most_each([16, 16], 2) == 16 and most_each([16, 16], 3) == 8
    assert most_each([16, 4], 2) == 8 and most_each([16, 4], 1) == 16
    assert most_each([1], 2) == most_each([], 1) == 1  # which wait for more nodes


def test_replicas_have_as_many_gpus_as_a_model_needs(tmp_path, monkeypatch):
    """Those that are named, or that it was compiled for; and each model the numbers of its own target."""
    folder = tmp_path
    (folder / "manifest.json").touch()
    manifest = {"gpus": 2, "target": {"kind": "vulkan"}}
    monkeypatch.setattr(ray_cluster, "Artifact", SimpleNamespace(open=lambda path: SimpleNamespace(manifest=manifest)))
    cases = ({}, {"devices": (0, 1, 2)}, {"split": "tensor", "gpus": 4}, {"model": str(folder)})
    assert [gpus_each(LoadOptions(**given)) for given in cases] == [1, 3, 4, 2]
    loaded = []
    monkeypatch.setattr(models, "load_engine", loaded.append)
    for kind in ("vulkan", "rocm"):
        manifest["target"]["kind"] = kind
        ray_cluster._load({"a": LoadOptions(model=str(folder))}, "a", (2, 3))
    assert [options.devices for options in loaded] == [(2, 3), (0, 1)]
