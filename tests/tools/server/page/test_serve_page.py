"""The chat page: its built files, and what people do with it, in Chromium against a real server with the bundled model.

The tests of the second kind are skipped where playwright or Chromium is not installed.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("starlette")
from servers.page_browser import PHONE, answer, ask, chromium, program, set_parameters, stored, visits
from servers.serving import ServeProcess, started

SERVER = Path(__file__).resolve().parents[4] / "tools" / "server"
PAGE, SOURCE = SERVER / "page", SERVER / "page_source"
KEY = "a key of the tests"
ATTACK = "<img src=x onerror=\"document.title='broken'; window.broken = 1\"><script>window.broken = 1</script>"
QUESTION = "What does os.path.join do?"


# ---- the built files


def test_build_is_current():
    digest = hashlib.sha256()
    for name in ("build.mjs", "package-lock.json", *sorted(f"src/{path.name}" for path in (SOURCE / "src").iterdir())):
        digest.update(f"{name}\0".encode() + (SOURCE / name).read_bytes() + b"\0")
    for name in ("app.js", "theme.js", "app.css"):
        assert (PAGE / name).read_text().startswith(f"/* sources: {digest.hexdigest()} */"), "run `npm run build`"
    for name in ("index.html", "icon.svg"):
        assert (PAGE / name).read_bytes() == (SOURCE / "src" / name).read_bytes()


def test_files():
    sizes = {path.name: path.stat().st_size for path in PAGE.iterdir()}
    assert set(sizes) == {"index.html", "app.js", "app.css", "theme.js", "icon.svg", "LICENSES.txt"}
    assert sum(sizes.values()) < 400_000
    for name in ("index.html", "app.css"):
        assert not re.search(r"https?://", (PAGE / name).read_text())
    licences = (PAGE / "LICENSES.txt").read_text()
    for name, version in json.loads((SOURCE / "package.json").read_text())["dependencies"].items():
        assert f"{name} {version}" in licences


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_contrast(theme):
    """Of text: 4.5, of the borders of fields: 3 (WCAG 2.2, 1.4.3 and 1.4.11)."""
    css = (SOURCE / "src" / "colours.css").read_text()
    colours = {name: pair.split(", ")[theme] for name, pair in re.findall(r"--([\w-]+): light-dark\((#.*?)\);", css)}

    def luminance(name: str) -> float:
        values = (int(colours[name][at : at + 2], 16) / 255 for at in (1, 3, 5))
        linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in values]
        return sum(weight * value for weight, value in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    def contrast(one: str, other: str) -> float:
        low, high = sorted((luminance(one), luminance(other)))
        return (high + 0.05) / (low + 0.05)

    for front in ("text", "muted", "accent"):
        for back in ("bg", "side", "raised", "bubble", "hover", "code"):
            if (front, back) != ("accent", "hover"):  # no such text
                assert contrast(front, back) >= 4.5, (front, back)
    assert contrast("accent-text", "accent") >= 4.5
    assert contrast("danger", "danger-soft") >= 4.5
    assert min(contrast("strong-line", back) for back in ("bg", "raised")) >= 3


# ---- in a browser


@pytest.fixture(scope="module")
def served(request, tmp_path_factory) -> Iterator[ServeProcess]:
    """A server with the bundled model under two names, which wants a key."""
    program()  # before a model is compiled for nothing
    artifact = request.getfixturevalue("demo_artifact")
    options = ("--models-max", "2", "--target", "cpu", "--quiet")
    log = tmp_path_factory.mktemp("page") / "log"
    with started(f"one={artifact}", f"two={artifact}", *options, log=log, key=KEY) as found:
        yield found


@pytest.fixture(scope="module")
def address(served) -> str:
    return served.url


@pytest.fixture(scope="module")
def browser(served):
    with chromium() as browser:
        yield browser


@pytest.fixture
def visit(browser, address):
    with visits(browser, address, KEY) as visit:
        yield visit


def test_policy(browser, address):
    response = browser.new_context().request.get(address)
    policy = dict(part.split(" ", 1) for part in response.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"


def test_conversation(visit, address):
    page = visit(key=None)
    page.get_by_label("Key", exact=True).fill(KEY)
    assert page.locator("#model").inner_text() == "This server needs an API key."
    assert page.locator("#model.failed").count() == page.get_by_role("alert").count() == 0
    page.get_by_role("button", name="Use key").click()
    page.wait_for_function("() => document.querySelector('#model')?.value === 'one'")
    assert visit.wrong == ["Failed to load resource: the server responded with a status of 401 (Unauthorized)"]
    visit.wrong.clear()

    ask(page, QUESTION)
    said = answer(page)
    first = said.locator(".markdown").inner_text()
    assert first
    assert re.search(r"tokens/s · \d+ tokens · first after [\d.]+ s", said.locator(".figures").inner_text())
    assert page.title().startswith(QUESTION)

    used = page.locator(".context").get_by_text(re.compile(r"^\d+ of 2,048 tokens$"))
    used.wait_for()
    before = int(used.inner_text().split()[0])
    page.get_by_label("Message", exact=True).fill("What does os.path.split do?")
    page.wait_for_function(
        "before => parseInt(document.querySelector('.context').textContent.match(/\\d+/)[0]) > before", arg=before
    )
    page.get_by_label("Message", exact=True).fill("")

    page.keyboard.press("ArrowUp")
    page.get_by_role("textbox", name="Edit the message").fill("What does os.path.split do?")
    page.keyboard.press("Enter")
    page.get_by_text("What does os.path.split do?", exact=True).last.wait_for()
    assert answer(page).locator(".markdown").inner_text() != first
    assert page.locator(".versions").inner_text() == "2/2"
    page.get_by_label("Previous version").click()
    page.get_by_text(QUESTION, exact=True).last.wait_for()
    assert answer(page).locator(".markdown").inner_text() == first

    page.get_by_label("Regenerate the answer").click()
    page.locator(".message.assistant .versions", has_text="2/2").wait_for()
    assert answer(page).locator(".markdown").inner_text() == first  # greedy

    page.reload()
    page.get_by_label("Key", exact=True).wait_for(state="hidden")
    assert answer(page).locator(".markdown").inner_text() == first
    ask(page, "Thanks.")
    page.get_by_text("Thanks.", exact=True).wait_for()
    answer(page, 2)

    item = page.get_by_role("navigation").get_by_role("listitem")
    item.hover()
    item.get_by_label("Rename").click()
    page.get_by_label("Title").fill(f"Paths {ATTACK}")
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.title.startsWith('Paths <img')")
    page.get_by_label("Search conversations").fill("nothing has this")
    page.get_by_text("Nothing found.").wait_for()
    page.get_by_label("Search conversations").fill("PATH.SPLIT")  # of the branch that is not shown
    item.wait_for()
    item.hover()
    item.get_by_label("Delete").click()
    page.get_by_text("What can I help with?").wait_for()
    assert not stored(page)
    page.get_by_role("button", name="Undo").click()
    item.get_by_text("Paths").click()
    answer(page, 2)
    assert len(stored(page)) == 7


def test_stop(visit):
    page = visit()
    set_parameters(page, temperature=5, seed=1)  # nearly any token: the answer does not end by itself
    with page.expect_request("**/v1/chat/completions") as request:
        ask(page, QUESTION)
    assert request.value.post_data_json["temperature"] == 5
    page.locator(".message.growing .block").first.wait_for()
    page.keyboard.press("Escape")
    page.get_by_text("Stopped.").wait_for()
    (message,) = [message for message in stored(page).values() if message["role"] == "assistant"]
    assert message["state"] == "stopped"
    assert message["text"]
    set_parameters(page, max_tokens=1)
    page.get_by_role("button", name="Continue").click()
    page.get_by_text("The answer reached its limit of tokens.").wait_for()
    assert stored(page)[message["id"]]["text"].startswith(message["text"])


def test_model(visit):
    page = visit()
    page.get_by_label("Model").select_option("two")
    with page.expect_request("**/v1/chat/completions") as request:
        ask(page, QUESTION)
    assert request.value.post_data_json["model"] == "two"
    answer(page)
    page.reload()
    page.wait_for_function("() => document.querySelector('#model')?.value === 'two'")
    page.keyboard.press("Control+k")
    page.get_by_text("What can I help with?").wait_for()
    assert page.get_by_label("Model").input_value() == "two"


def test_attacks(visit, tmp_path):
    """What users, models and imported files say stays text."""
    page = visit()
    ask(page, f"{QUESTION} {ATTACK}")
    answer(page)
    with page.expect_download() as download:
        page.get_by_role("button", name="Settings").click()
        page.get_by_role("button", name="Export").click()
    exported = json.loads(Path(download.value.path()).read_text())
    (record,) = exported["records"]
    markdown = "\n\n".join(
        (
            ATTACK,
            "[link](javascript:broken=1) ![image](https://example.com/x.png) $x<img src=x onerror=broken=1>$",
            f"| a |\n| - |\n| {ATTACK} |",
            f"```html\n{ATTACK}\n```",
            f'``` " onclick=x\n{ATTACK}\n```',
            "<details open ontoggle='broken=1'>",
            "[x]: javascript:broken=1",
            "[x] <b onclick=x>b</b> <b>bold</b>",
        )
    )
    record["conversation"] |= {"id": "b" * 24, "title": f"{ATTACK} imported"}
    for message in record["messages"]:
        message |= {"id": message["id"][::-1], "parent": message["parent"] and message["parent"][::-1], "error": ATTACK}
        message |= {"text": markdown, "thinking": ATTACK, "model": ATTACK}
    record["messages"].sort(key=lambda message: message["role"])
    record["conversation"]["leaf"] = record["messages"][0]["id"]
    file = tmp_path / "conversations.json"
    file.write_text(json.dumps(exported))
    page.get_by_label("File to import").set_input_files(file)
    page.get_by_text("1 conversation imported.").wait_for()
    page.get_by_role("navigation").get_by_text("imported").click()
    said = answer(page)
    said.locator("summary").click()
    assert said.locator(".block b").inner_text() == "bold"
    assert said.locator(".hljs-tag").count()
    assert ATTACK in said.locator(".thoughts").inner_text()
    assert ATTACK in said.locator(".markdown p").first.inner_text()
    inside = page.locator(".messages, .sidebar").locator(
        "img, script, iframe, [onerror], [onclick], [ontoggle], [style], a:not([href^='https://'])"
    )
    assert inside.count() == 0
    assert page.evaluate("window.broken") is None
    assert page.title().startswith("<img")

    file.write_text('{"format": "another"}')
    page.get_by_label("File to import").set_input_files(file)
    page.get_by_text("This file holds no exported conversations.").wait_for()


def test_tabs(visit):
    """Nothing is lost of what two tabs add to a conversation."""
    one = visit()
    ask(one, QUESTION)
    answer(one)
    two = one.context.new_page()
    two.goto(one.url)
    answer(two)
    for page in (one, two):
        set_parameters(page, max_tokens=4)
        page.get_by_label("Message", exact=True).fill(f"And on {'one' if page is one else 'two'}?")
    for page in (one, two):
        page.get_by_label("Send (Enter)").click()
    for page in (one, two):
        page.wait_for_function(
            "() => !document.querySelector('.growing') && document.querySelector('.send').title[1] === 'e'"
        )
    texts = {message["text"] for message in stored(one).values() if message["role"] == "user"}
    assert texts == {QUESTION, "And on one?", "And on two?"}
    assert len(stored(one)) == 6
    two.keyboard.press("Control+k")
    ask(two, "Another one")
    one.get_by_role("navigation").get_by_text("Another one").wait_for()
    answer(two)


def test_phone(visit):
    page = visit(**PHONE, color_scheme="dark")
    assert page.locator(".sidebar").get_attribute("inert") is not None
    page.get_by_label("Message", exact=True).fill("What does\nos.path.join")
    page.keyboard.press("Enter")  # begins a line
    page.keyboard.type("do?")
    page.get_by_label("Send (Enter)").tap()
    answer(page)
    assert page.locator(".message.user .plain").inner_text() == "What does\nos.path.join\ndo?"
    page.get_by_role("button", name="Conversations").tap()
    page.get_by_role("button", name="Settings").tap()
    page.get_by_label("Theme", exact=True).select_option("light")
    assert page.evaluate("getComputedStyle(document.documentElement).colorScheme") == "light"
    page.keyboard.press("Escape")
    page.keyboard.press("Escape")
    assert page.locator(".sidebar").get_attribute("inert") is not None
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    unnamed = (
        "[...document.querySelectorAll('button, input, select, textarea')]"
        ".filter(one => !one.ariaLabel && !one.textContent && !one.labels?.length)"
    )
    assert page.evaluate(f"{unnamed}.length") == 0


def test_lost_connection(visit, served):
    """The last test of the server."""
    page = visit()
    set_parameters(page, temperature=5, seed=2)
    ask(page, QUESTION)
    page.locator(".message.growing .block").first.wait_for()
    served.process.kill()
    page.get_by_role("alert").get_by_text("The connection to the server was lost.").wait_for()
    page.get_by_role("button", name="Try again").wait_for()
    assert page.locator(".message.assistant .markdown").inner_text()
    assert all(text.startswith("Failed to load resource: net::ERR_") for text in visit.wrong)
    visit.wrong.clear()
