"""Images in requests: all forms up to tokens and tiles, models without an encoder, images of the web."""

import base64
import http.server
import io
import threading

import pytest

pytest.importorskip("starlette")
from image_cases import picture, references

from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.images.prompts import ImagePrompts
from mlc_amd.tools.server.apis import anthropic, ollama, openai_chat, responses
from mlc_amd.tools.server.errors import ApiError
from mlc_amd.tools.server.fields import Fields
from mlc_amd.tools.server.prompts import Prompter

file = io.BytesIO()
picture(64, 48).save(file, "PNG")
PNG = file.getvalue()
BASE64 = base64.b64encode(PNG).decode()
URL = f"data:image/png;base64,{BASE64}"


def content(part: dict) -> list[dict]:
    return [{"role": "user", "content": [{"type": "text", "text": "Look:"}, part]}]


def block(**source: str) -> dict:
    return {"messages": content({"type": "image", "source": source}), "max_tokens": 1}


REQUESTS = {
    "openai": (openai_chat.chat_request, {"messages": content({"type": "image_url", "image_url": {"url": URL}})}),
    "openai text": (openai_chat.chat_request, {"messages": content({"type": "image_url", "image_url": URL})}),
    "anthropic": (anthropic.messages_request, block(type="base64", media_type="image/png", data=BASE64)),
    "anthropic url": (anthropic.messages_request, block(type="url", url=URL)),
    "ollama": (ollama.chat_request, {"messages": [{"role": "user", "content": "Look:", "images": [BASE64]}]}),
    "ollama generate": (ollama.generate_request, {"prompt": "Look:", "images": [BASE64]}),
    "responses": (
        lambda fields, client: responses.asked_of(fields, (), client).request,
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": URL}]}]},
    ),
}


def prompter(served, vision: dict | None, urls: bool = False) -> Prompter:
    served.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1})
    model = served.service.library.loaded["demo"]
    engine = model.engine
    images = ImagePrompts(engine.tokenizer, vision)
    return Prompter(engine.tokenizer, engine.chat_template, model.tool_template, True, model.reasoning, images, urls)


@pytest.mark.parametrize("name", REQUESTS)
def test_forms(served, name):
    make, body = REQUESTS[name]
    text, prompt = prompter(served, references()["gemma3"]["vision"]).prompt(make(Fields(body), "me"))
    assert text.count("\ufdd1") == 1
    (image,) = prompt.images.values()
    assert image.rows == 16 and sum(token < 0 for token in prompt) == 16


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", REQUESTS["openai"][1]),
        ("/v1/messages", REQUESTS["anthropic"][1]),
        ("/v1/responses", REQUESTS["responses"][1]),
        ("/api/chat", REQUESTS["ollama"][1]),
        ("/api/generate", REQUESTS["ollama generate"][1]),
    ],
)
def test_a_model_without_an_encoder_says_so(served, path, body):
    status, _, answer = served.request(path, body)
    assert status == 400 and "the model takes no images" in str(answer)


@pytest.mark.parametrize(
    ("url", "error"),
    [
        ("https://example.com/a.png", "fetches no images.*--allow-image-urls"),
        ("file:///etc/passwd", "it must be a data URL"),
        ("data:image/png;base64,!!", "is not base64"),
        ("data:image/png;base64,aGVsbG8=", "is no picture that can be read"),
        ("aGVsbG8=", "is no picture that can be read"),
    ],
)
def test_what_is_no_image(served, url, error):
    asked = openai_chat.chat_request(Fields({"messages": content({"type": "image_url", "image_url": url})}), "me")
    with pytest.raises((ApiError, UserError), match=error):
        prompter(served, references()["gemma3"]["vision"]).prompt(asked)


# ---- images of the web

image_urls = pytest.importorskip("mlc_amd.tools.server.image_urls")


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("8.8.8.8", True), ("2606:4700::1111", True), ("127.0.0.1", False), ("10.1.2.3", False),
        ("169.254.169.254", False), ("192.168.0.1", False), ("100.64.0.1", False), ("0.0.0.0", False),
        ("224.0.0.1", False), ("::1", False), ("fe80::1%eth0", False), ("fc00::1", False), ("::ffff:127.0.0.1", False),
        ("64:ff9b::7f00:1", False), ("2002:7f00:1::", False), ("::ffff:8.8.8.8", False),
    ],
)  # fmt: skip
def test_public_addresses(address, public):
    assert image_urls.is_public(address) is public


@pytest.mark.parametrize(
    "url",
    ["http://localhost/a.png", "http://127.0.0.1:1/", "http://[::1]/", "http://0x7f000001/", "http://2130706433/"],
)
def test_private_addresses_are_refused(url):
    with pytest.raises(UserError, match=r"not of the public web|cannot be fetched"):
        image_urls.fetch(url, "it")


@pytest.mark.parametrize("url", ["http://a:b@example.com/", "http:///a", "http://example.com:99999/", "http://é.com/"])
def test_urls_that_are_refused(url):
    with pytest.raises(UserError, match="must be like https"):
        image_urls.fetch(url, "it")


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/slow":
            threading.Event().wait(3)
            return
        if self.path in ("/loop", "/inside", "/there"):
            places = {"/loop": "/loop", "/inside": "http://localhost:1/", "/there": "/a.png"}
            self.send_response(302)
            self.send_header("Location", places[self.path])
            self.end_headers()
            return
        self.send_response(404 if self.path == "/none" else 200)
        self.end_headers()
        self.wfile.write(bytes(200) if self.path == "/large" else b"image")

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture(scope="module")
def web():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def test_fetching(web, monkeypatch):
    """This machine's address stands for one of the web, localhost's IPv6 address for a private one."""
    resolve = image_urls.socket.getaddrinfo

    def resolved(host: str, *arguments: object, **options: object):
        return (
            [(*resolve("::1", 1)[0][:4], ("::1", 1))] if host == "localhost" else resolve(host, *arguments, **options)
        )

    monkeypatch.setattr(image_urls.socket, "getaddrinfo", resolved)
    monkeypatch.setattr(image_urls, "is_public", lambda address: address == "127.0.0.1")
    assert image_urls.fetch(f"{web}/a.png", "it") == image_urls.fetch(f"{web}/there", "it") == b"image"
    monkeypatch.setattr(image_urls, "MOST_BYTES", 100)
    monkeypatch.setattr(image_urls, "_SECONDS", 0.5)
    for path, error in (
        ("/none", "has the status 404"),
        ("/loop", "redirects more than 3 times"),
        ("/inside", "not of the public web"),
        ("/large", "is larger than"),
        ("/slow", "did not arrive within"),
    ):
        with pytest.raises(UserError, match=error):
            image_urls.fetch(f"{web}{path}", "it")
