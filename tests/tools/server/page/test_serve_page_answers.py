"""What the chat page makes of answers: attacks, scrolling, thinking, refusals, widths, keys, what is rendered.

In Chromium, against a server whose answers the tests write; skipped where playwright or Chromium is not installed.
"""

from threading import Event

import pytest
from servers.page_browser import PHONE, answer, ask, set_parameters

ATTACKS = (
    "<img src=x onerror=\"document.title='broken'; window.broken = 1\">",
    "<script>window.broken = 1</script>",
    "<svg/onload=window.broken=1><style>@import 'https://example.com/x.css';</style>",
    "<iframe srcdoc='<script>parent.broken = 1</script>'></iframe><base href='https://example.com/'>",
    "<a href=javascript:window.broken=1>a</a> [b](javascript:window.broken=1) [c](data:text/html,<script>1</script>)",
    "[d](<java\tscript:window.broken=1>) [e]: JaVaScRiPt:window.broken=1 ![f](https://example.com/f.png)",
    '![g](x"onerror=window.broken=1) $\\text{<img src=x onerror=window.broken=1>}$',
    "<math><mtext><table><mglyph><style><img src=x onerror=window.broken=1>",
    "<details open ontoggle=window.broken=1><summary>h</summary></details> <b style='position:fixed' onclick=1>i</b>",
    "```html onload=window.broken=1\n</code></pre><img src=x onerror=window.broken=1>\n```",
)
WORDS = "Words that *follow* each other, with `code` and **more** of them. "
TABLE = "| column | another | a third one |\n| - | - | -: |\n" + "| some words | `more of them` | 3 |\n" * 8
WIDE_TABLE = f"| {'x' * 200} | b |\n| - | - |\n" + "| some words | more of them |\n" * 20
CODE = (
    "```python\n"
    + "".join(f"def f{i}(x: int) -> str:\n    return f'{{x}} {i}'  # {i}\n\n" for i in range(12))
    + "```\n"
)
FORMULA = "$$\n\\sum_{i=1}^{n} \\frac{e^{x_i}}{\\sqrt{d_k}} = \\begin{pmatrix} 1 & 0 \\\\ 0 & 1 \\end{pmatrix}\n$$\n"
LISTS = "1. one\n   - two\n2. three\n\n- [x] done\n"
RICH = f"## A heading\n\n{WORDS * 6}\n\n{TABLE}\n{FORMULA}\n{LISTS}\n> {WORDS}\n\n{CODE}\n"


def distance(page, box: str = ".scroll") -> float:
    """Pixels between what is shown of a box and its end."""
    return page.locator(box).last.evaluate("box => box.scrollHeight - box.scrollTop - box.clientHeight")


def wait_for_distance(page, condition: str) -> None:
    difference = "b.scrollHeight - b.scrollTop - b.clientHeight"
    page.wait_for_function(f"() => {{ const b = document.querySelector('.scroll'); return {difference} {condition} }}")


def frames(page, count: int = 3) -> None:
    page.evaluate(
        """count => new Promise(resolve => {
          const next = () => (count-- > 0 ? requestAnimationFrame(next) : resolve())
          next()
        })""",
        count,
    )


def test_attacks(visit, says):
    page = visit()
    for number, text in enumerate(("\n\n".join(ATTACKS), "\n".join(ATTACKS)), 1):
        says(text=text, thinking=text, rate=2000)
        ask(page, text)
        answer(page, number)
    page.locator(".thinking summary").last.click()
    frames(page)
    inside = page.locator(".messages, .sidebar").locator(
        "img, svg:not([aria-hidden]), script, style, iframe, base, form, [style], a:not([href^='https://']), "
        "[onerror], [onload], [onclick], [ontoggle], [open] [open]"
    )
    assert inside.count() == 0
    assert page.evaluate("window.broken") is None
    assert page.title().startswith("<img")
    assert page.locator(".message.assistant").last.get_by_text("<script>window.broken = 1</script>").count()


def test_scrolling(visit, says):
    page = visit(viewport={"width": 1000, "height": 600})
    for number in (1, 2):  # a conversation of many screens
        says(text=RICH)
        ask(page, "More")
        answer(page, number)
    frames(page)
    assert distance(page) < 2
    page.locator(".scroll").evaluate("box => box.scrollTo(0, 0)")
    page.get_by_label("To the end").wait_for()

    more, end = Event(), Event()
    says(text=[RICH * 2, more, RICH, end], rate=1000)
    ask(page, "And more")
    page.locator(".message.growing").wait_for()
    worst = 0.0
    while page.locator(".message.growing .code").count() < 2:  # one for each part
        worst = max(worst, distance(page))
    assert worst < 2, "the view lags behind the answer"
    page.locator(".scroll").hover()
    page.mouse.wheel(0, -12)  # less than a line
    wait_for_distance(page, "> 2")
    frames(page)
    top = page.locator(".scroll").evaluate("box => box.scrollTop")
    more.set()
    page.get_by_label("To the end").wait_for()
    page.wait_for_function("() => document.querySelectorAll('.message.growing .code').length === 3")
    assert page.locator(".scroll").evaluate("box => box.scrollTop") == top
    page.get_by_label("To the end").click()
    wait_for_distance(page, "< 2")
    last = page.locator(".message.assistant .block").last
    last.get_by_text("def f11").wait_for()
    frames(page, 30)
    before = last.bounding_box()
    end.set()
    answer(page, 3)
    frames(page)
    assert last.bounding_box() == before, "the end of an answer moves it"


@pytest.mark.parametrize("box, text", [("pre", f"```python\n{'x' * 300}\n{CODE[9:]}"), (".scroller", WIDE_TABLE)])
def test_boxes_stay_while_they_grow(visit, says, box, text):
    """A block of code or a table that the user scrolled sideways."""
    page = visit()
    says(text=text, rate=150)
    ask(page, "Well?")
    page.wait_for_function(
        """box => {
          const one = document.querySelector(`.growing ${box}`)
          return one?.scrollWidth > one?.clientWidth + 50
        }""",
        arg=box,
    )
    grown = page.locator(box)
    grown.focus()
    grown.evaluate("box => { box.scrollLeft = 40 }")
    rows = grown.inner_text()
    answer(page)
    assert grown.evaluate("box => [box.scrollLeft, box === document.activeElement]") == [40, True]
    assert len(grown.inner_text()) > len(rows)


def test_thinking(visit, says):
    page = visit(viewport={"width": 1000, "height": 600})
    go = Event()
    says(thinking=WORDS * 60, text=[go])
    says(thinking="Hm.", text="Yes.")
    ask(page, "Well?")
    summary = page.locator(".thinking summary")
    page.get_by_text("Thinking…").wait_for()
    assert not page.locator(".thoughts").is_visible()
    summary.click()
    frames(page)
    assert distance(page, ".thoughts") < 2
    assert page.locator(".thoughts").bounding_box()["height"] < 500
    go.set()
    page.get_by_text("The model gave no answer.").wait_for()
    page.get_by_role("button", name="Try again").click()
    page.locator(".messages").get_by_text("Yes.").wait_for()
    answer(page)
    assert summary.last.inner_text().startswith("Thought for")

    says(thinking=WORDS * 60, text=WORDS * 10)
    ask(page, "And?")
    answer(page, 2)
    frames(page)
    before = summary.last.bounding_box()
    summary.last.click()
    page.locator(".thoughts").last.wait_for()
    frames(page)
    assert summary.last.bounding_box() == before


def test_refusals(visit, says, server):
    page = visit()
    says(status=503, error="too many requests are waiting")
    says(text="The first half", cut=True)
    says(text=" and the second.")
    ask(page, "Well?")
    page.get_by_role("alert").get_by_text("too many requests are waiting").wait_for()
    page.get_by_role("button", name="Try again").click()
    page.get_by_role("alert").get_by_text("The connection to the server was lost.").wait_for()
    page.get_by_role("button", name="Continue").click()
    page.locator(".messages").get_by_text("The first half and the second.", exact=True).wait_for()
    answer(page)
    assert [len(request["messages"]) for request in server.requests] == [1, 1, 2]
    assert page.get_by_role("alert").count() == 0

    says(status=401, error="a key is missing")
    says(status=401, error="the key is wrong")
    says(text="Right.")
    ask(page, "And?")
    page.get_by_text("This server answers only requests with its key.").wait_for()
    page.get_by_label("Key", exact=True).fill("wrong")
    page.get_by_role("button", name="Use key").click()
    page.get_by_text("The server does not accept this key.").wait_for()
    page.get_by_label("Key", exact=True).fill("right")
    page.keyboard.press("Enter")
    page.locator(".messages").get_by_text("Right.").wait_for()
    statuses = [text.partition("status of ")[2][:3] for text in visit.wrong if "Failed to load resource" in text]
    assert statuses == ["503", "401", "401"]
    visit.wrong.clear()


def test_settings(visit, says, server):
    page = visit()
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Thinking", exact=True).select_option("low")
    page.keyboard.press("Escape")
    set_parameters(page, temperature=0.5, top_p=0.9, top_k=40, max_tokens=100)
    says(text="Yes.")
    ask(page, "Well?")
    answer(page)
    sent = server.requests[-1]
    assert sent["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Well?"}]
    options = {"temperature": 0.5, "top_p": 0.9, "top_k": 40, "max_tokens": 100, "reasoning_effort": "low"}
    assert options.items() <= sent.items()


@pytest.mark.parametrize("options", [{"viewport": {"width": 1280, "height": 800}}, PHONE], ids=["desktop", "phone"])
def test_nothing_is_too_wide(visit, says, options):
    page = visit(**options)
    long = "x" * 400
    wide = "| a | b |\n" + "| - | - |\n" + f"| {long} | {'some words ' * 30} |\n"
    says(
        text=f"{RICH}\n{long} `{long}`\n\n- {long}\n\n# {long}\n\n{wide}\n```\n{long}\n```\n\n$${'x_1^2 + ' * 100}$$",
        thinking=long,
    )
    page.get_by_label("Message", exact=True).fill(f"{long} https://example.com/{long}")
    page.get_by_label("Send (Enter)").click()
    answer(page)
    page.locator(".thinking summary").click()
    frames(page)
    boxes = ".scroll, .messages, .message, .block, .plain, .thoughts, .code, .foot, .bar, .composer"
    outside = page.evaluate(
        """boxes => [...document.querySelectorAll(boxes)].filter(box => {
          const { left, right } = box.getBoundingClientRect()
          const fits = !box.matches('.scroll, .thoughts') || box.scrollWidth <= box.clientWidth
          return left < 0 || right > innerWidth || !fits
        }).map(box => box.className)""",
        boxes,
    )
    assert outside == []


def test_keyboard(visit, says):
    """Each element that takes the focus has a name and shows the focus, uncut."""
    page = visit()
    says(text=f"{RICH} [link](https://example.com)", thinking=WORDS)
    ask(page, "Well?")
    answer(page)
    names = []
    for _ in range(60):
        page.keyboard.press("Tab")
        focused = page.evaluate(
            """() => {
              const one = document.activeElement
              if (one === document.body) return null
              const { outlineStyle, outlineOffset, outlineWidth } = getComputedStyle(one)
              const { left, right } = one.getBoundingClientRect()
              const reach = parseFloat(outlineOffset) + parseFloat(outlineWidth)
              let cut = false
              for (let box = one.parentElement; box; box = box.parentElement) {
                const around = box.getBoundingClientRect()
                const outside = left - reach < around.left || right + reach > around.right
                if (getComputedStyle(box).overflowX !== 'visible' && outside) cut = true
              }
              const name = one.ariaLabel || one.labels?.[0]?.textContent || one.textContent.trim()
              return { name, shown: one.id === 'composer' || (outlineStyle !== 'none' && !cut) }
            }"""
        )
        if focused is None and names:
            break  # once around
        if focused is None:
            continue  # the document itself
        assert focused["name"]
        assert focused["shown"], focused["name"]
        names.append(focused["name"])
    wanted = {
        "New conversation",
        "Search conversations",
        "Well?",
        "Rename “Well?”",
        "Delete “Well?”",
        "Settings",
        "Model",
    }
    assert wanted <= set(names)
    assert {"Copy code", "Code, python", "Table", "link", "Copy the message", "Regenerate the answer"} <= set(names)


@pytest.mark.parametrize(("text", "parts"), [(RICH * 5, 0), (CODE.removesuffix("```\n") * 30, 2)], ids=["text", "code"])
def test_what_is_rendered_while_an_answer_grows(visit, says, text, parts):
    """Only its last blocks, and of a long one of code only the last part, so that it takes no longer as it grows."""
    page = visit()
    page.evaluate(
        """() => {
          const known = { block: [], part: [] }
          window.changes = []  // places of what was known before and changed, from the end
          window.parts = 0
          new MutationObserver(records => {
            const view = document.querySelector('.growing .markdown')
            if (!view) return
            for (const { target, removedNodes } of records) {
              const element = target instanceof Element ? target : target.parentElement
              const within = element.closest('.part') ?? element.closest('.block')
              for (const one of element === view ? removedNodes : [within])
                for (const all of Object.values(known))
                  if (all.includes(one)) window.changes.push(all.length - all.indexOf(one))
            }
            known.block = [...view.children]
            known.part = [...view.querySelectorAll('.part')]
            window.parts = Math.max(window.parts, known.part.length)
          }).observe(document.body, { childList: true, characterData: true, subtree: true })
        }"""
    )
    says(text=text, rate=800)
    ask(page, "More")
    answer(page)
    changes = page.evaluate("window.changes")
    assert len(changes) > 5
    assert max(changes) <= (1 if parts else 2)
    assert page.evaluate("window.parts") >= parts
    assert distance(page) < 2
