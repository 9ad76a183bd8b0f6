"""A tiny model that sees, through each API: requests of its own client with the same picture have the same prompt, and
what is wrong with an image is a 4xx in the API's form. `test_serve_images.py` has the forms alone.
"""

import base64
import http.server
import io
import threading
import zlib

import pytest

pytest.importorskip("starlette")
from image_cases import picture
from servers.serving import serving

from mlc_amd.runtime.engine.engine import Engine
from mlc_amd.runtime.options import RunOptions
from mlc_amd.tools.server.library import Library

TEXT, ROWS = "Look:", 16


def png(side: int = 40) -> bytes:
    file = io.BytesIO()
    picture(side, side).save(file, "PNG")
    return file.getvalue()


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def url(data: bytes) -> str:
    return f"data:image/png;base64,{encoded(data)}"


def bomb() -> bytes:
    """A PNG of 2.5 gigapixels in 300 kB."""
    data = bytearray(png())
    data[16:24] = (50_000).to_bytes(4) * 2
    data[29:33] = zlib.crc32(data[12:29]).to_bytes(4)
    return bytes(data)


@pytest.fixture(scope="module")
def seen(seeing):
    """A server with the model, which may fetch images."""
    library = Library({"sees": lambda: Engine.load(seeing, RunOptions(threads=2, kv_tokens=4096))}, image_urls=True)
    with serving(library, max_body=1) as found:
        yield found


@pytest.fixture
def of_text(seen) -> int:
    """Tokens of the prompt without its image."""
    body = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 1}
    return seen.post("/v1/chat/completions", body)["usage"]["prompt_tokens"]


def messages(*urls: str) -> list[dict]:
    """In OpenAI's form."""
    images = [{"type": "image_url", "image_url": {"url": one}} for one in urls]
    return [{"role": "user", "content": [*images, {"type": "text", "text": TEXT}]}]


def asked(seen, *urls: str, **options) -> dict:
    body = {"messages": messages(*urls), "max_tokens": 4, "temperature": 0, "logprobs": True, "top_logprobs": 5}
    return seen.post("/v1/chat/completions", body | options)


def logprobs(answer: dict) -> list[float]:
    first = answer["choices"][0]["logprobs"]["content"][0]
    return [one["logprob"] for one in first["top_logprobs"]]


# ---- clients: (prompt's tokens, text)


def openai(seen, data: bytes) -> tuple[int, str]:
    client = pytest.importorskip("openai").OpenAI(base_url=f"{seen.url}/v1", api_key="-")
    made = client.chat.completions.create(model="sees", messages=messages(url(data)), max_tokens=4, temperature=0)
    return made.usage.prompt_tokens, made.choices[0].message.content


def openai_streamed(seen, data: bytes) -> tuple[int, str]:
    client = pytest.importorskip("openai").OpenAI(base_url=f"{seen.url}/v1", api_key="-")
    parts = list(
        client.chat.completions.create(
            model="sees", messages=messages(url(data)), max_tokens=4, temperature=0, stream=True,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    return parts[-1].usage.prompt_tokens, "".join(one.choices[0].delta.content or "" for one in parts if one.choices)


def openai_responses(seen, data: bytes) -> tuple[int, str]:
    client = pytest.importorskip("openai").OpenAI(base_url=f"{seen.url}/v1", api_key="-")
    content = [
        {"type": "input_image", "image_url": url(data), "detail": "auto"},
        {"type": "input_text", "text": TEXT},
    ]
    question = [{"role": "user", "content": content}]
    made = client.responses.create(model="sees", input=question, max_output_tokens=4, temperature=0)
    return made.usage.input_tokens, made.output_text


def anthropic(seen, data: bytes) -> tuple[int, str]:
    client = pytest.importorskip("anthropic").Anthropic(base_url=seen.url, api_key="-")
    source = {"type": "base64", "media_type": "image/png", "data": encoded(data)}
    content = [{"type": "image", "source": source}, {"type": "text", "text": TEXT}]
    question = [{"role": "user", "content": content}]
    made = client.messages.create(model="sees", max_tokens=4, messages=question, extra_body={"temperature": 0})
    assert client.messages.count_tokens(model="sees", messages=question).input_tokens > ROWS
    usage = made.usage
    return usage.input_tokens + (usage.cache_read_input_tokens or 0), made.content[0].text


def ollama(seen, data: bytes) -> tuple[int, str]:
    client = pytest.importorskip("ollama").Client(seen.url)
    options = {"num_predict": 4, "temperature": 0}
    question = [{"role": "user", "content": TEXT, "images": [data]}]
    made = client.chat(model="sees", messages=question, options=options)
    assert client.generate(model="sees", prompt=TEXT, images=[data], options=options).response == made.message.content
    assert "vision" in client.show("sees").capabilities
    return made.prompt_eval_count, made.message.content


def langchain(seen, data: bytes) -> tuple[int, str]:
    chat = pytest.importorskip("langchain_openai").ChatOpenAI
    made = chat(base_url=f"{seen.url}/v1", api_key="-", model="sees", max_tokens=4, temperature=0).invoke(
        [("user", messages(url(data))[0]["content"])]
    )
    return made.usage_metadata["input_tokens"], made.text


CLIENTS = (openai, openai_streamed, openai_responses, anthropic, ollama, langchain)


@pytest.mark.parametrize("client", CLIENTS)
def test_clients(seen, of_text, client):
    data = png()
    answer = asked(seen, url(data))
    expected = answer["usage"]["prompt_tokens"], answer["choices"][0]["message"]["content"]
    assert client(seen, data) == expected and expected[0] > of_text + ROWS


def test_pictures_decide_what_is_said(seen):
    one, other = url(png()), url(png(48))
    first = asked(seen, one)
    again = asked(seen, one)
    assert logprobs(again) == logprobs(first) != logprobs(asked(seen, other))
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > ROWS
    both = asked(seen, one, other)
    assert both["usage"]["prompt_tokens"] >= first["usage"]["prompt_tokens"] + ROWS
    assert logprobs(both) != logprobs(asked(seen, other, one))


def test_texts_with_images(seen):
    """llama-server's."""
    data = encoded(png())

    def completed(prompt: dict | list) -> dict:
        return seen.post("/completion", {"prompt": prompt, "n_predict": 4, "temperature": 0})

    prompt = seen.post("/apply-template", {"messages": messages(url(png()))})["prompt"]
    made = completed({"prompt_string": prompt, "multimodal_data": [data]})
    assert made["content"] == asked(seen, url(png()))["choices"][0]["message"]["content"]
    one = {"prompt_string": "A <__media__> is", "multimodal_data": [data]}
    made = completed(one)
    assert made["tokens_evaluated"] > ROWS and made["content"]
    with_image, without = completed([one, {"prompt_string": "A is"}])
    assert with_image["content"] == made["content"]
    assert with_image["tokens_evaluated"] >= without["tokens_evaluated"] + ROWS
    for prompt, error in (
        ({"prompt_string": "A is", "multimodal_data": [data]}, "once for each of multimodal_data"),
        ({"prompt_string": "A <__media__>", "multimodal_data": [""]}, "is no picture that can be read"),
        ({"prompt_string": "A <__media__>", "multimodal_data": [5]}, "a list of strings"),
    ):
        status, _, answer = seen.request("/completions", {"prompt": prompt})
        assert status == 400 and error in answer["error"]["message"]


def test_what_models_can_do(seen, served):
    for server, takes in ((seen, True), (served, False)):
        asked(seen, url(png()))  # it is loaded
        served.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1})
        models = server.post("/v1/models", None)
        (model,) = models["data"]
        assert ("image" in model["architecture"]["input_modalities"]) is takes
        assert ("multimodal" in models["models"][0]["capabilities"]) is takes
        assert server.post("/props", None)["modalities"]["vision"] is takes
        assert ("vision" in server.post("/api/show", {"model": ""})["capabilities"]) is takes


# ---- what is refused


def bodies(image: str) -> dict[str, dict]:
    """Requests by path. image: a data URL, or base64."""
    data = image.partition(",")[2] or image
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    message = {"role": "user", "content": "x", "images": [data]}
    return {
        "/v1/chat/completions": {"messages": messages(image)},
        "/v1/responses": {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": image}]}]},
        "/v1/messages": {"max_tokens": 1, "messages": [{"role": "user", "content": [block]}]},
        "/api/chat": {"messages": [message]},
        "/api/generate": {"prompt": "x", "images": [data]},
    }


def error_of(answer: dict) -> str:
    found = answer["error"]
    return found if isinstance(found, str) else found["message"]


@pytest.mark.parametrize("path", bodies(""))
def test_damaged_pictures(seen, path):
    for image, error in (
        (url(png()[:200]), "is damaged"),
        (url(b"%PDF-1.4 ..."), "is no picture that can be read: give a PNG, JPEG, WebP or GIF file"),
        (url(bomb()), "has more than 67 million pixels: make it smaller"),
        ("data:image/png;base64,%%%", "is not base64"),
    ):
        status, _, answer = seen.request(path, bodies(image)[path])
        assert status == 400 and error in error_of(answer) and "\n" not in error_of(answer)


def test_too_many_and_too_large(seen):
    status, _, answer = seen.request("/v1/chat/completions", {"messages": messages(*[url(png(8))] * 65)})
    assert status == 400 and "65 images, of which there may be 64" in answer["error"]["message"]
    status, _, answer = seen.request("/v1/chat/completions", {"messages": messages(url(bytes(1 << 20)))})
    assert status == 413 and "larger than 1048576 bytes" in answer["error"]["message"]
    status, _, answer = seen.request("/v1/chat/completions", {"messages": messages(*[url(png(8))] * 40)})
    assert status == 400 and answer["error"]["code"] == "context_length_exceeded"


class Web(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/slow":
            threading.Event().wait(1)
            return
        self.send_response(200)
        self.end_headers()
        self.wfile.write({"/a.png": png(), "/large": bytes(100_000)}.get(self.path, b"<html>"))

    def log_message(self, *_: object) -> None:
        """Nothing."""


def test_images_of_the_web(seen, served, monkeypatch):
    image_urls = pytest.importorskip("mlc_amd.tools.server.image_urls")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Web) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        web = f"http://127.0.0.1:{server.server_port}"

        def refused(path: str, error: str) -> None:
            for form in (messages(web + path), [{"role": "user", "content": [block(web + path)]}]):
                where = "/v1/messages" if "source" in str(form) else "/v1/chat/completions"
                status, _, answer = seen.request(where, {"messages": form, "max_tokens": 1})
                assert status == 400 and error in answer["error"]["message"]

        refused("/a.png", "not of the public web")
        monkeypatch.setattr(image_urls, "is_public", lambda address: address == "127.0.0.1")
        assert logprobs(asked(seen, f"{web}/a.png")) == logprobs(asked(seen, url(png())))
        refused("/page", "is no picture that can be read")
        monkeypatch.setattr(image_urls, "MOST_BYTES", 50_000)
        refused("/large", "is larger than")
        monkeypatch.setattr(image_urls, "_SECONDS", 0.3)
        refused("/slow", "did not arrive within")
        server.shutdown()


def block(address: str) -> dict:
    return {"type": "image", "source": {"type": "url", "url": address}}
