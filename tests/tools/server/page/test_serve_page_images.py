"""Images in the chat page: pasted, dropped, chosen, removed, sent, kept; in Chromium, as the other tests of the page
(conftest.py), and once with a real server and a model that sees.
"""

import base64
import io
import json
from pathlib import Path

from PIL import Image
from servers.page_browser import answer, ask, stored, transfer, visits
from servers.serving import started

COLOURS = {"red": (200, 20, 20), "green": (20, 160, 20), "blue": (20, 20, 200)}


def picture(colour: str = "red", kind: str = "PNG", size: tuple[int, int] = (60, 40), **options) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, COLOURS[colour]).save(file, kind, **options)
    return file.getvalue()


def url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def decoded(url: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))).convert("RGB")


def choose(page, *files: tuple[str, str, bytes]) -> None:
    chosen = [{"name": name, "mimeType": kind, "buffer": data} for name, kind, data in files]
    page.get_by_label("Files to attach").set_input_files(chosen)


def test_images_are_attached_sent_and_kept(visit, says, server):
    page = visit()
    red, green, blue = picture("red"), picture("green", "GIF"), picture("blue", "WEBP", lossless=True)
    transfer(page, "paste", ("image.png", "image/png", red))
    transfer(page, "drop", ("g.gif", "image/gif", green), ("note.txt", "text/plain", b"a note"))
    choose(page, ("b.webp", "image/webp", blue), ("x.png", "image/png", red))
    shown = page.locator(".composer .picture img")
    shown.nth(3).wait_for()
    assert [one.get_attribute("alt") for one in shown.all()] == ["image.png", "g.gif", "b.webp", "x.png"]
    page.get_by_label("Remove x.png").click()
    shown.nth(3).wait_for(state="detached")
    says(text="Colours.")
    ask(page, "What is it?")
    answer(page)
    sent = [url(red), url(green, "image/gif"), url(blue, "image/webp")]
    parts = [{"type": "image_url", "image_url": {"url": one}} for one in sent]
    text = {"type": "text", "text": "File `note.txt`:\n```txt\na note\n```\n\nWhat is it?"}
    question = {"role": "user", "content": [*parts, text]}
    assert server.requests[-1]["messages"] == [question]
    assert shown.count() == 0

    page.reload()
    kept = page.locator(".message.user .picture img")
    kept.nth(2).wait_for()
    assert [one.get_attribute("src") for one in kept.all()] == sent
    assert page.evaluate("[...document.querySelectorAll('.picture img')].every(one => one.naturalWidth === 60)")
    says(text="Yes.")
    ask(page, "Sure?")
    answer(page, 2)
    assert server.requests[-1]["messages"][0] == question

    page.get_by_label("Edit the message").first.click()
    for name in ("g.gif", "b.webp", "note.txt"):
        page.get_by_label(f"Remove {name}").click()
    page.get_by_role("textbox", name="Edit the message").fill("")
    says(text="Red.")
    page.get_by_role("button", name="Send", exact=True).click()
    page.locator(".messages").get_by_text("Red.", exact=True).wait_for()
    assert server.requests[-1]["messages"] == [{"role": "user", "content": parts[:1]}]


def test_large_pictures_are_made_smaller(visit, says, server):
    """And upright; formats that servers do not decode become others."""
    page = visit()
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    big = picture("green", "JPEG", (3000, 2000), exif=exif)
    choose(page, ("big.jpg", "image/jpeg", big), ("old.bmp", "image/bmp", picture("blue", "BMP")))
    page.locator(".composer .picture img").nth(1).wait_for()
    says(text="Yes.")
    ask(page, "Well?")
    answer(page)
    first, second, _ = server.requests[-1]["messages"][0]["content"]
    made = decoded(first["image_url"]["url"])
    assert abs(made.width * made.height / (1 << 22) - 1) < 0.01 and abs(made.height / made.width - 1.5) < 0.01
    assert max(abs(a - b) for a, b in zip(made.getpixel((9, 9)), COLOURS["green"], strict=True)) < 4
    assert decoded(second["image_url"]["url"]).size == (60, 40)


def test_what_is_refused(visit, says, server):
    page = visit()
    choose(page, ("bad.png", "image/png", picture()[:40]), ("good.png", "image/png", picture()))
    alert = page.locator(".refusals")
    page.get_by_text("“bad.png” cannot be read: attach a PNG, JPEG, WebP or GIF file.").wait_for()
    page.get_by_label("Model").select_option("two")
    ask(page, "What is it?")
    page.get_by_text("two takes no images: choose a model that does").wait_for()
    page.get_by_label("Remove good.png").click()
    transfer(page, "paste", ("other.png", "image/png", picture()))
    alert.get_by_text("two takes no images").wait_for()
    assert page.locator(".composer .picture").count() == 0 and not server.requests
    says(text="Text.")
    page.keyboard.press("Enter")
    answer(page)


def test_conversations_that_the_browser_keeps_no_more_go_back_to_the_field(visit):
    page = visit()
    transfer(page, "paste", ("image.png", "image/png", picture()))
    page.locator(".composer .picture").wait_for()
    page.evaluate("() => { IDBObjectStore.prototype.put = () => { throw new DOMException('', 'QuotaExceededError') } }")
    ask(page, "What is it?")
    page.get_by_text("this browser keeps no more, delete conversations that have images").wait_for()
    assert page.get_by_label("Message", exact=True).input_value() == "What is it?"
    assert page.locator(".composer .picture").count() == 1 and not stored(page)


def test_exported_images_come_back(visit, says, tmp_path):
    page = visit()
    transfer(page, "paste", ("image.png", "image/png", picture()))
    page.locator(".composer .picture").wait_for()
    says(text="Red.")
    ask(page, "What is it?")
    answer(page)
    with page.expect_download() as download:
        page.get_by_role("button", name="Settings").click()
        page.get_by_role("button", name="Export").click()
    exported = json.loads(Path(download.value.path()).read_text())
    file = tmp_path / "conversations.json"
    for image, message in (
        (url(picture()), "1 conversation imported."),
        ("javascript:broken=1", "An image of this file is none."),
        ("data:image/svg+xml;base64,AAAA", "An image of this file is none."),
        ("https://example.com/a.png", "An image of this file is none."),
    ):
        (record,) = exported["records"]
        (file_of,) = [one for message in record["messages"] for one in message.get("files", ())]
        file_of["url"] = image
        file.write_text(json.dumps(exported))
        other = visit()
        other.get_by_label("File to import").set_input_files(file)
        other.get_by_text(message).wait_for()
        if message.startswith("1"):
            other.get_by_role("navigation").get_by_text("What is it?").click()
            assert other.locator(".message.user .picture img").get_attribute("src") == image


def test_with_a_model_that_sees(browser, seeing, tmp_path):
    with (
        started(f"sees={seeing}", "--target", "cpu", "--quiet", log=tmp_path / "log") as served,
        visits(browser, served.url) as visit,
    ):
        page = visit()
        page.wait_for_function("() => document.querySelector('#model')?.value === 'sees'")
        transfer(page, "paste", ("red.png", "image/png", picture("red")))
        transfer(page, "drop", ("blue.jpg", "image/jpeg", picture("blue", "JPEG")))
        page.locator(".composer .picture").nth(1).wait_for()
        page.evaluate("localStorage.setItem('mlc-amd.sampling', JSON.stringify({max_tokens: 4, temperature: 0}))")
        ask(page, "What is it?")
        answer(page)
        (said,) = [message for message in stored(page).values() if message["role"] == "assistant"]
        assert said["figures"]["promptTokens"] > 32 and not said["error"]
