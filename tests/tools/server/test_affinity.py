"""Which replica gets a request: the one that has its prompt cached, as long as others are not much less busy."""

from mlc_amd.tools.server.affinity import Affinity, prompt_blocks

IDLE = {"a": 0, "b": 0, "c": 0}


def conversation(*texts: str) -> dict:
    roles = ("user", "assistant")
    return {"model": "m", "messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]}


def test_a_continued_conversation_has_the_blocks_of_its_beginning():
    first, second = conversation("x" * 1000), conversation("x" * 1000, "y" * 1000, "z" * 1000)
    blocks = prompt_blocks(first)
    assert len(blocks) == 8 and prompt_blocks(second)[: len(blocks)] == blocks
    assert prompt_blocks(conversation("v" + "x" * 999))[0] != blocks[0]
    assert prompt_blocks(first | {"model": "n"})[0] != blocks[0]
    assert prompt_blocks(first | {"tools": [{"type": "function"}]})[0] != blocks[0]
    assert prompt_blocks(first | {"temperature": 1}) == blocks


def test_all_apis_have_prompts():
    long = "x" * 300
    for body in ({"prompt": long}, {"input": long}, {"prompt": [long, long]}, {"system": long, "messages": []}):
        assert prompt_blocks(body)
    for body in ({}, {"prompt": "short"}, [], "text", None, {"messages": 3}):
        assert prompt_blocks(body) == ()
    assert len(prompt_blocks({"prompt": "x" * 2_000_000})) == 4096


def test_others_are_balanced():
    affinity = Affinity()
    assert {affinity.ranked((), IDLE)[0] for _ in range(3)} == {"a", "b", "c"}
    assert affinity.ranked((), {"a": 2, "b": 1, "c": 3}) == ["b", "a", "c"]
    assert affinity.ranked((), {"c": 5}) == ["c"]


def test_the_longest_prefix_wins_unless_its_replica_is_busy():
    affinity = Affinity()
    prompt = prompt_blocks(conversation("x" * 12800))
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
    first, second = prompt_blocks({"prompt": "x" * 7700}), prompt_blocks({"prompt": "y" * 7700})
    assert len(first) == len(second) == 60
    affinity.given("a", first)
    affinity.given("b", second)
    assert affinity.ranked(second, {"a": 1, "b": 1})[0] == "b"
    # 40 blocks of the first are left: worth two answers in progress.
    assert affinity.ranked(first, {"a": 2, "b": 0})[0] == "a"
    assert affinity.ranked(first, {"a": 3, "b": 0})[0] == "b"
