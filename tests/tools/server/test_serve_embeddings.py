"""Embeddings and ranking over HTTP, in all APIs, and with their clients; a chat model beside them. What llama.cpp's
test_embedding.py and test_rerank.py ask of a server is asked here, too, of tiny models with random weights."""

import base64

import numpy as np
import pytest

from mlc_amd.runtime.engine.engine import Engine

pytest.importorskip("starlette")

TEXTS = ["hello world", "Embeddings of texts", "hello world hello world"]
MODEL = {"model": "emb"}


@pytest.fixture(scope="module")
def server(embedding_models, demo_artifact):
    from servers.serving import serving

    from mlc_amd.tools.server.library import Library

    with serving(Library(embedding_models | {"chat": lambda: Engine.load(demo_artifact)}, most=4)) as found:
        yield found


def vectors(answer) -> np.ndarray:
    return np.array([one["embedding"] for one in answer["data"]])


def test_openai(server):
    answer = server.post("/v1/embeddings", MODEL | {"input": TEXTS})
    found = vectors(answer)
    assert found.shape == (3, 256) and np.allclose(np.linalg.norm(found, axis=1), 1)
    assert [one["index"] for one in answer["data"]] == [0, 1, 2] and answer["usage"]["prompt_tokens"] > 9
    alone = np.concatenate([vectors(server.post("/v1/embeddings", MODEL | {"input": text})) for text in TEXTS])
    assert np.allclose(found, alone, atol=1e-6)
    ids = [server.post("/tokenize", MODEL | {"content": text, "add_special": True})["tokens"] for text in TEXTS]
    assert np.allclose(found, vectors(server.post("/v1/embeddings", MODEL | {"input": ids})), atol=1e-6)
    assert np.allclose(found[:1], vectors(server.post("/v1/embeddings", MODEL | {"input": ids[0]})), atol=1e-6)
    parts = [[ids[0][0], TEXTS[0], ids[0][-1]], [7]]
    assert np.allclose(found[:1], vectors(server.post("/v1/embeddings", MODEL | {"input": parts}))[:1], atol=1e-6)
    packed = server.post("/v1/embeddings", MODEL | {"input": TEXTS, "encoding_format": "base64", "dimensions": 8})
    decoded = [np.frombuffer(base64.b64decode(one["embedding"]), "<f4") for one in packed["data"]]
    assert np.allclose(decoded, found[:, :8] / np.linalg.norm(found[:, :8], axis=1, keepdims=True), atol=1e-6)


def test_others(server):
    expected = vectors(server.post("/v1/embeddings", MODEL | {"input": TEXTS}))
    assert np.allclose(server.post("/api/embed", MODEL | {"input": TEXTS})["embeddings"], expected)
    raw = np.array(server.post("/api/embeddings", MODEL | {"prompt": TEXTS[0]})["embedding"])
    assert np.allclose(raw / np.linalg.norm(raw), expected[0], atol=1e-6) and abs(np.linalg.norm(raw) - 1) > 1e-3
    for path in ("/embedding", "/embeddings"):
        found = server.post(path, MODEL | {"content": TEXTS})
        assert np.allclose([one["embedding"][0] for one in found], expected)
    for norm, of in ((-1, raw), (0, raw / np.abs(raw).max() * 32760), (1, raw / np.abs(raw).sum())):
        found = server.post("/embedding", MODEL | {"content": TEXTS[0], "embd_normalize": norm})
        assert np.allclose(found[0]["embedding"][0], of, rtol=1e-4)
    tokens = server.post("/tokenize", {"model": "none", "content": TEXTS[0], "add_special": True})["tokens"]
    rows = server.post("/embedding", {"model": "none", "input": TEXTS[0]})[0]["embedding"]
    assert np.shape(rows) == (len(tokens), 256) and np.abs(np.linalg.norm(rows, axis=1) - 1).min() > 1e-3
    assert server.request("/v1/embeddings", {"model": "none", "input": "x"})[0] == 400
    assert server.post("/api/show", MODEL)["capabilities"] == ["embedding"]


def test_rerank(server):
    body = {"model": "rank", "query": "hello", "documents": TEXTS}
    answer = server.post("/v1/rerank", body)
    scores = [one["relevance_score"] for one in answer["results"]]
    assert scores == sorted(scores, reverse=True) and sorted(one["index"] for one in answer["results"]) == [0, 1, 2]
    some = server.post("/rerank", body | {"top_n": 1, "return_documents": True})["results"]
    assert [one["document"]["text"] for one in some] == [TEXTS[answer["results"][0]["index"]]]
    cohere = server.post("/v2/rerank", body | {"documents": [{"text": text} for text in TEXTS]})
    assert cohere["results"] == answer["results"] and cohere["meta"]["api_version"]["version"] == "2"
    tei = server.post("/rerank", {"model": "rank", "query": "hello", "texts": TEXTS})
    assert [(one["index"], one["score"]) for one in tei] == [
        (one["index"], one["relevance_score"]) for one in answer["results"]
    ]


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/embeddings", {}, 400),
        ("/v1/embeddings", {"input": []}, 400),
        ("/v1/embeddings", {"input": [1, None]}, 400),
        ("/v1/embeddings", {"input": {"a": 1}}, 400),
        ("/v1/embeddings", {"input": [[1 << 40]]}, 400),
        ("/v1/embeddings", {"input": [[1 << 70]]}, 400),
        ("/v1/embeddings", {"input": "a", "encoding_format": "x"}, 400),
        ("/v1/embeddings", {"input": "a", "dimensions": 257}, 400),
        ("/v1/embeddings", {"input": "a b " * 600}, 400),
        ("/v1/embeddings", {"input": "a", "model": "other"}, 404),
        ("/v1/embeddings", {"input": "a", "model": "chat"}, 400),
        ("/v1/embeddings", {"input": "a", "model": "rank"}, 400),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, 400),
        ("/api/embeddings", {}, 400),
        ("/v1/rerank", {"model": "rank", "query": "a"}, 400),
        ("/v1/rerank", {"model": "rank", "documents": ["a"]}, 400),
        ("/v1/rerank", {"model": "rank", "query": "a", "documents": []}, 400),
        ("/v1/rerank", {"model": "rank", "query": "a", "documents": [1]}, 400),
        ("/v1/rerank", {"query": "a", "documents": ["a"]}, 400),
    ],
)
def test_errors(path, body, status, server):
    found, _, answer = server.request(path, body)
    assert found == status and answer["error"]


def test_long_texts_are_cut_for_ollama(server):
    assert len(server.post("/api/embed", MODEL | {"input": "a b " * 600})["embeddings"]) == 1
    assert server.request("/api/embed", MODEL | {"input": "a b " * 600, "truncate": False})[0] == 400


def test_metrics(server):
    server.post("/v1/embeddings", MODEL | {"input": TEXTS})
    text = server.request("/metrics")[2]
    assert (
        'mlc_amd:encoded_texts_total{model_name="emb"}' in text and 'vllm:prompt_tokens_total{model_name="emb"}' in text
    )


def test_chat_beside_them(server):
    body = {"model": "chat", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    assert server.post("/v1/chat/completions", body)["usage"]["completion_tokens"] == 2


# ---- clients


def test_openai_client(server):
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="x")
    found = client.embeddings.create(model="emb", input=TEXTS)  # asks for base64
    assert np.allclose([one.embedding for one in found.data], vectors(server.post("/v1/embeddings", {"input": TEXTS})))


def test_ollama_client(server):
    ollama = pytest.importorskip("ollama")
    client = ollama.Client(host=server.url)
    assert np.allclose(client.embed("emb", TEXTS).embeddings, vectors(server.post("/v1/embeddings", {"input": TEXTS})))
    assert len(client.embeddings("emb", TEXTS[0]).embedding) == 256


def test_langchain_client(server):
    langchain = pytest.importorskip("langchain_openai")
    client = langchain.OpenAIEmbeddings(
        base_url=f"{server.url}/v1", api_key="x", model="emb", check_embedding_ctx_length=False
    )
    expected = vectors(server.post("/v1/embeddings", {"input": TEXTS}))
    assert np.allclose(client.embed_documents(TEXTS), expected) and np.allclose(
        client.embed_query(TEXTS[0]), expected[0]
    )


def test_llama_index_client(server):
    module = pytest.importorskip("llama_index.embeddings.openai_like")
    client = module.OpenAILikeEmbedding(model_name="emb", api_base=f"{server.url}/v1", api_key="x")
    expected = vectors(server.post("/v1/embeddings", {"input": TEXTS}))
    assert np.allclose(client.get_text_embedding_batch(TEXTS), expected)


def test_chromadb_client(server):
    chromadb = pytest.importorskip("chromadb")
    from chromadb.utils.embedding_functions import OpenAIEmbeddingFunction

    function = OpenAIEmbeddingFunction(api_key="x", api_base=f"{server.url}/v1", model_name="emb")
    found = chromadb.EphemeralClient().create_collection("texts", embedding_function=function)
    found.add(ids=["a", "b", "c"], documents=TEXTS)
    assert found.query(query_texts=[TEXTS[1]], n_results=1)["ids"] == [["b"]]
