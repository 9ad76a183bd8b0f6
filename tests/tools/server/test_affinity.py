"""Which replica gets a request: the one that has its prompt cached, as long as others are not much less busy."""

import random
import string

from mlc_amd.tools.server.affinity import Affinity, prompt_blocks

IDLE = {"a": 0, "b": 0, "c": 0}


def conversation(*texts: str) -> dict:
    roles = ("user", "assistant")
    return {"model": "m", "messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]}


def test_a_continued_conversation_has_the_blocks_of_its_beginning():
    first, second = conversation("x " * 500), conversation("x " * 500, "y " * 500, "z " * 500)
    blocks = prompt_blocks(first)
    assert len(blocks) == 8 and prompt_blocks(second)[: len(blocks)] == blocks
    assert prompt_blocks(conversation("v" + "x " * 500))[0] != blocks[0]
    assert prompt_blocks(first | {"model": "n"})[0] != blocks[0]
    assert prompt_blocks(first | {"tools": [{"type": "function"}]})[0] != blocks[0]
    assert prompt_blocks(first | {"temperature": 1}) == blocks


def test_an_image_counts_as_its_rows():
    image, other = ("".join(random.Random(i).choices(string.ascii_letters, k=1 << 20)) for i in range(2))

    def of(data: str, text: str) -> tuple[int, ...]:
        part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
        return prompt_blocks({"messages": [{"role": "user", "content": [part, {"type": "text", "text": text}]}]})

    blocks = of(image, "x " * 500)
    assert 16 <= len(blocks) - len(prompt_blocks(conversation("x " * 500))) <= 18
    assert of(image, "y " * 500)[:16] == blocks[:16] != of(other, "x " * 500)[:16]


def test_all_apis_have_prompts():
    long = "x" * 300
    for body in ({"prompt": long}, {"input": long}, {"prompt": [long, long]}, {"system": long, "messages": []}):
        assert prompt_blocks(body)
    for body in ({}, {"prompt": "short"}, [], "text", None, {"messages": 3}):
        assert prompt_blocks(body) == ()
    assert len(prompt_blocks({"prompt": "x " * 1_000_000})) == 4096


def test_others_are_balanced():
    affinity = Affinity()
    assert {affinity.ranked((), IDLE)[0] for _ in range(3)} == {"a", "b", "c"}
    assert affinity.ranked((), {"a": 2, "b": 1, "c": 3}) == ["b", "a", "c"]
    assert affinity.ranked((), {"c": 5}) == ["c"]


def test_the_longest_prefix_wins_unless_its_replica_is_busy():
    affinity = Affinity()
    prompt = prompt_blocks(conversation("x " * 6400))
    affinity.given("a", prompt[:20])
    affinity.given("b", prompt[:60])
    for _ in range(3):
        assert affinity.ranked(prompt, IDLE) == ["b", "a", "c"]
    assert affinity.ranked(prompt, {"a": 0, "b": 2, "c": 0})[0] == "b"  # 40 blocks more than a, each answer costs 16
    assert affinity.ranked(prompt, {"a": 0, "b": 3, "c": 0})[0] == "a"
    affinity.gone("b")
    assert affinity.ranked(prompt, IDLE)[0] == "a"


def test_what_was_used_longest_ago_is_forgotten_from_its_end():
    affinity = Affinity(most=100)
    first, second = prompt_blocks({"prompt": "x " * 3850}), prompt_blocks({"prompt": "y " * 3850})
    assert len(first) == len(second) == 60
    affinity.given("a", first)
    affinity.given("b", second)
    assert affinity.ranked(second, {"a": 1, "b": 1})[0] == "b"
    # 40 blocks of the first are left: worth two answers in progress.
    assert affinity.ranked(first, {"a": 2, "b": 0})[0] == "a"
    assert affinity.ranked(first, {"a": 3, "b": 0})[0] == "b"
