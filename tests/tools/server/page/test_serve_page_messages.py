"""What the chat page does with messages: files, versions, continuing, deleting, the use of the context, and its words
for a server that has no answer yet. In Chromium, as the other tests of the page (conftest.py).
"""

import pytest
from servers.page_browser import PHONE, answer, ask, stored, transfer

ATTACH = "attach text, code or data saved as UTF-8, or a PNG, JPEG, WebP or GIF file."
TICKS = b"# A list\n```\na\n```\n"


def attach(page, *files: tuple[str, bytes]) -> None:
    chosen = [{"name": name, "mimeType": "text/plain", "buffer": text} for name, text in files]
    page.get_by_label("Files to attach").set_input_files(chosen)


def said(server) -> list[str]:
    return [message["content"] for message in server.requests[-1]["messages"]]


def test_files(visit, says, server):
    page = visit()
    attach(page, ("a.py", b"x = 1\r\ny = 2\r\n"), ("b.md", TICKS), ("c.txt", "\ufeffgrün".encode("utf-16")))
    transfer(page, "drop", ("d`.txt", "text/plain", b"dropped"))
    transfer(page, "paste", ("e.txt", "text/plain", b"pasted"))
    chips = page.locator(".composer .chip")
    page.get_by_text("12 bytes · 10 tokens, 1 % of context").wait_for()
    page.get_by_label("Remove c.txt").click()
    chips.nth(3).wait_for()
    assert [text.split("\n")[0] for text in chips.all_inner_texts()] == ["a.py", "b.md", "d .txt", "e.txt"]
    says(text="Good.")
    ask(page, "Well?")
    answer(page)
    fences = (
        "```py\nx = 1\ny = 2\n```",
        f"````md\n{TICKS.decode()}````",
        "```txt\ndropped\n```",
        "```txt\npasted\n```",
    )
    names = ("a.py", "b.md", "d .txt", "e.txt")
    whole = "\n\n".join(f"File `{name}`:\n{fence}" for name, fence in zip(names, fences, strict=True))
    assert said(server) == [f"{whole}\n\nWell?"]
    assert chips.count() == 0

    page.reload()
    page.get_by_text("a.py").click()
    assert page.locator(".message.user pre").first.inner_text() == "x = 1\ny = 2\n"
    page.keyboard.press("Tab")
    page.get_by_label("Message", exact=True).focus()
    page.keyboard.press("ArrowUp")
    for name in names[1:]:
        page.get_by_label(f"Remove {name}").click()
    says(text="Better.")
    page.keyboard.press("Enter")
    page.locator(".messages").get_by_text("Better.", exact=True).wait_for()
    assert said(server) == [f"File `a.py`:\n{fences[0]}\n\nWell?"]


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("p.png", b"\x89PNG\r\n\x1a\n\x00", f"“p.png” is neither a text file nor an image: {ATTACH}"),
        ("l.txt", "grün".encode("latin-1"), f"“l.txt” is neither a text file nor an image: {ATTACH}"),
        ("z.txt", b"a\0b", f"“z.txt” is neither a text file nor an image: {ATTACH}"),
        ("n.txt", b" \n", "“n.txt” is empty: attach a file that has text."),
        ("big", b"x" * 2_000_000, "“big” has 1.9 MiB: attach at most 1.0 MiB, such as the part that matters."),
    ],
)
def test_refused_files(visit, name, text, message):
    page = visit()
    attach(page, (name, text), ("good.txt", b"text"))
    assert page.get_by_role("alert").inner_text() == message
    assert page.locator(".composer .chip .name").all_inner_texts() == ["good.txt"]


def test_answers_are_edited_continued_and_deleted(visit, says, server):
    page = visit()
    says(text="One two", thinking="Hm.", finish="length")
    says(text=" three.")
    ask(page, "Count.")
    page.get_by_role("button", name="Continue", exact=True).click()
    page.locator(".messages").get_by_text("One two three.", exact=True).wait_for()
    assert server.requests[-1]["messages"][-1] == {
        "role": "assistant",
        "content": "One two",
        "reasoning_content": "Hm.",
    }
    says(text="Yes.")
    ask(page, "Again?")
    answer(page, 2)

    first = page.locator(".message.assistant").first
    first.get_by_label("Edit the answer").click()
    page.get_by_role("textbox", name="Edit the answer").fill("Four ")
    says(text="five.")
    page.get_by_role("button", name="Save and continue").click()
    page.locator(".messages").get_by_text("Four five.", exact=True).wait_for()
    assert said(server) == ["Count.", "Four "]
    first.get_by_label("Edit the answer").click()
    page.get_by_role("textbox", name="Edit the answer").fill("Six.")
    page.get_by_role("button", name="Save", exact=True).click()
    page.locator(".messages").get_by_text("Six.", exact=True).wait_for()
    says(text=" Seven.")
    page.get_by_label("Continue the answer").click()
    page.locator(".messages").get_by_text("Six. Seven.", exact=True).wait_for()
    assert page.locator(".versions").inner_text() == "3/3"

    first.get_by_label("Delete the answer").click()
    page.locator(".messages").get_by_text("Four five.", exact=True).wait_for()
    page.get_by_role("button", name="Undo").click()
    page.locator(".messages").get_by_text("Six. Seven.", exact=True).wait_for()
    page.get_by_label("Previous version").click()
    page.get_by_label("Previous version").click()
    page.locator(".messages").get_by_text("Yes.", exact=True).wait_for()
    says(text="!")  # continues an earlier answer; what followed it stays
    first.get_by_label("Continue the answer").click()
    page.locator(".messages").get_by_text("One two three.!", exact=True).wait_for()
    assert said(server) == ["Count.", "One two three."]
    assert len(stored(page)) == 7
    page.locator(".message.user").get_by_label("Delete the message").click()
    page.get_by_text("What can I help with?").wait_for()


def test_thinking_that_was_cut_off_is_begun_again(visit, says):
    page = visit()
    says(thinking="Hm.", finish="length")
    says(text="Yes.")
    ask(page, "Well?")
    page.get_by_text("The answer reached its limit of tokens.").wait_for()
    page.get_by_role("button", name="Try again").click()
    page.locator(".messages").get_by_text("Yes.", exact=True).wait_for()


@pytest.mark.parametrize("options", [{}, PHONE], ids=["mouse", "touch"])
def test_actions_are_shown_without_hovering(visit, says, options):
    page = visit(**options)
    for number in (1, 2):
        says(text="Yes.")
        page.get_by_label("Message", exact=True).fill("Well?")
        page.get_by_label("Send (Enter)").click()
        answer(page, number)
    for role, names in (
        ("user", ("Copy", "Edit", "Delete")),
        ("assistant", ("Copy", "Edit", "Regenerate", "Continue")),
    ):
        for name in names:
            button = page.locator(f".message.{role}").first.get_by_role("button", name=name)
            hidden = (
                "one => { for (; one; one = one.parentElement) if (getComputedStyle(one).opacity < 1) return true }"
            )
            assert button.is_visible() and not button.evaluate(hidden), name


def test_use_of_the_context(visit, says):
    page = visit()
    meter = page.get_by_role("meter", name="Context used")
    says(text="one two three", prompt_tokens=6000)
    ask(page, "Well?")
    answer(page)
    page.get_by_text("6,004 of 8,192 tokens").wait_for()
    page.get_by_label("Message", exact=True).fill("word " * 1000)
    page.get_by_text("7,004 of 8,192 tokens").wait_for()
    page.get_by_text("The context is nearly full").wait_for()
    assert meter.get_attribute("aria-valuenow") == "7004"
    page.get_by_label("Message", exact=True).fill("word " * 3000)
    page.get_by_text("Too long for this model").wait_for()
    page.get_by_label("Message", exact=True).fill("")
    page.get_by_text("Too long for this model").wait_for(state="hidden")
    says(text="four", prompt_tokens=8191, finish="length")
    ask(page, "And?")
    page.get_by_text("The answer reached the end of the model's context.").wait_for()
    assert page.locator(".message.assistant").last.get_by_role("button", name="Continue").count() == 0


def test_theme(visit):
    page = visit(color_scheme="dark")
    for text, scheme in (("Auto", "light dark"), ("Light", "light"), ("Dark", "dark"), ("Auto", "light dark")):
        button = page.get_by_role("button", name="Theme: ")
        assert button.inner_text() == text and button.get_attribute("title") == button.get_attribute("aria-label")
        assert page.evaluate("getComputedStyle(document.documentElement).colorScheme") == scheme
        button.click()


@pytest.mark.parametrize(
    "fields, shown, role",
    [
        ({"status": 413, "error": "the body has 17 MiB"}, "This conversation is too long for the model", "alert"),
        ({"status": 400, "code": "context_length_exceeded"}, "This conversation is too long for the model", "alert"),
        ({"status": 401, "error": "the API key is missing: send the header"}, "This server needs an API key.", None),
    ],
)
def test_refusals_in_plain_words(visit, says, fields, shown, role):
    page = visit()
    says(**fields)
    ask(page, "Well?")
    page.locator(".note").get_by_text(shown).wait_for()
    assert page.get_by_role("alert").count() == (1 if role else 0)
    assert "send the header" not in page.locator("body").inner_text()
    visit.wrong.clear()


def test_a_model_that_is_being_loaded(visit, says, server):
    server.loading = 2
    page = visit()
    page.wait_for_function("() => document.querySelector('#model').textContent === 'Loading model…'")
    assert page.locator("#model.failed").count() == 0
    page.wait_for_function("() => document.querySelector('#model').value === 'one'")
    for _ in range(2):
        says(status=503, code="loading_model", error="loading model: try again later")
    says(text="Yes.")
    ask(page, "Well?")
    page.locator(".growing").get_by_text("Loading model…").wait_for()
    page.locator(".messages").get_by_text("Yes.", exact=True).wait_for()
    assert len(server.requests) == 3 and not page.get_by_role("alert").count()
    says(status=503, code="loading_model")
    ask(page, "And?")
    page.locator(".growing").get_by_text("Loading model…").wait_for()
    page.keyboard.press("Escape")
    page.get_by_text("Stopped.").wait_for()
    visit.wrong.clear()
