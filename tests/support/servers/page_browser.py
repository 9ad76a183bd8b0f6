"""Chromium for the tests of the chat page, and what its users do in them.

`chromium()`: a browser; skips the test where playwright or Chromium is not installed. `visits()`: pages of users, which
fail the test for errors, breaches of the server's policy and requests to other servers.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]
PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}
TIMEOUT_MS = 30_000


def program() -> str:
    """Chromium's; skips the test where something that the page's tests need is missing."""
    for module in ("playwright.sync_api", "starlette", "uvicorn", "httptools", "prometheus_client"):
        pytest.importorskip(module)
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    return found or pytest.skip("Chromium is not installed")


@contextmanager
def chromium() -> Iterator[Any]:
    path = program()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


@contextmanager
def visits(browser: Any, address: str, key: str | None = None) -> Iterator[Callable[..., Any]]:
    """visit(options of a browser context) -> a page of a user who has the key. `visit.wrong`: what it did wrong, which
    has to be empty in the end."""
    contexts, wrong = [], []

    def watch(page) -> None:
        page.set_default_timeout(TIMEOUT_MS)
        page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on(
            "request", lambda request: None if request.url.startswith((address, "blob:")) else wrong.append(request.url)
        )

    def visit(key: str | None = key, **options):
        context = browser.new_context(**options)
        context.set_default_timeout(TIMEOUT_MS)
        contexts.append(context)
        context.on("page", watch)
        if key:
            context.add_init_script(
                f"if (location.protocol === 'http:') localStorage.setItem('mlc-amd.key', {json.dumps(key)})"
            )
        page = context.new_page()
        page.goto(address)
        return page

    visit.wrong = wrong
    yield visit
    for context in contexts:
        context.close()
    assert not wrong


def ask(page, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def answer(page, number: int = 1):
    """The last answer, once it is finished and is the answer with this number."""
    page.wait_for_function(
        """number => {
          const all = document.querySelectorAll('.message.assistant')
          const last = all[number - 1]?.querySelector('.foot')
          return all.length === number && !document.querySelector('.growing') && last.children.length
        }""",
        arg=number,
    )
    return page.locator(".message.assistant").last


def set_parameters(page, **values: float) -> None:
    page.get_by_role("button", name="Settings").click()
    for label, value in values.items():
        page.get_by_label(label.replace("_", " ").capitalize(), exact=True).fill(str(value))
    page.keyboard.press("Escape")


def transfer(page, event: str, *files: tuple[str, str, bytes]) -> None:
    """Files that are pasted or dropped together: name, type, bytes."""
    page.get_by_label("Message", exact=True).evaluate(
        """(area, [event, files]) => {
          const data = new DataTransfer()
          for (const [name, type, bytes] of files) data.items.add(new File([new Uint8Array(bytes)], name, { type }))
          const made = event === 'paste'
            ? new ClipboardEvent(event, { clipboardData: data, bubbles: true, cancelable: true })
            : new DragEvent(event, { dataTransfer: data, bubbles: true, cancelable: true })
          area.dispatchEvent(made)
        }""",
        [event, [[name, kind, list(data)] for name, kind, data in files]],
    )


def stored(page) -> dict[str, dict]:
    """The messages in the browser's store, by their ids."""
    return page.evaluate(
        """() => new Promise(resolve => {
          indexedDB.open('mlc-amd').onsuccess = opened => {
            opened.target.result.transaction('messages').objectStore('messages').getAll().onsuccess = read =>
              resolve(Object.fromEntries(read.target.result.map(message => [message.id, message])))
          }
        })"""
    )
