"""Messages and options as callers give them: what is taken, and the line that refuses the rest."""

import numpy as np
import pytest

from mlc_amd.runtime.engine.generation import check_ids, check_max_tokens, check_stop
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.sampling.settings import Sampling, SamplingChanges
from mlc_amd.runtime.text.messages import IMAGE, check_content, check_messages, check_question, content_of, images_of

USER, ASSISTANT = {"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}


def test_text_parts_are_joined():
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "this?"}]
    assert check_content("user", parts) == {"role": "user", "content": "What is this?"}
    assert check_messages(({"role": "user", "content": parts, "name": None},)) == [
        {"role": "user", "content": "What is this?"}
    ]
    assert check_messages([]) == []
    assert check_question([{"role": "system", "content": "Be brief."}, USER, ASSISTANT, USER])[-1] == USER


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ([], "there are no messages"),
        ({"role": "user"}, "a conversation is"),
        ("Hello", "a conversation is 'Hello'"),
        (["Hello"], r"messages\[0\] is 'Hello'"),
        ([{}], r"messages\[0\] has no role"),
        ([USER, {"role": "user"}], r"messages\[1\] has no content"),
        ([{"role": "assistant", "content": None}], r"messages\[0\] has no content"),
        (
            [{"role": "king", "content": "x"}],
            r"messages\[0\] has the role 'king': it must be one of system, user, assi",
        ),
        ([{**USER, "tool_calls": []}], "has 'tool_calls', which conversations cannot use"),
        ([{"role": "user", "content": 5}], r"the content of messages\[0\] is 5"),
        ([{"role": "user", "content": ["x"]}], r"part 0 of messages\[0\] is 'x'"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "it must be like .* or .*image"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://a/b"}}]}],
            "only data URLs can be used",
        ),
        (
            [{"role": "user", "content": [{"type": "image", "image": 5}]}],
            r"part 0 of messages\[0\] is 5: it must be a p",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], r"part 0 of messages\[0\] has no text"),
        ([USER, ASSISTANT], "the last message has the role assistant"),
    ],
)
def test_what_is_no_question_is_refused(messages, error):
    with pytest.raises(UserError, match=error):
        check_question(messages)


def test_images_have_marks_in_the_text():
    url = {"url": "data:image/png;base64,aGk="}
    parts = [
        {"type": "text", "text": f"A{IMAGE} "},
        {"type": "image", "image": b"one"},
        {"type": "image_url", "image_url": url},
        {"type": "text", "text": " B"},
    ]
    message = check_content("user", parts)
    assert message == {"role": "user", "content": f"A {IMAGE}{IMAGE} B", "images": [b"one", b"hi"]}
    assert images_of([message, message]) == [b"one", b"hi"] * 2
    for encoded in (False, True):
        assert check_content("user", content_of(message, encoded)) == message
    assert content_of(message)[1] == {"type": "image", "image": b"one"}
    with pytest.raises(UserError, match="the conversation has 66 images, of which there may be 64"):
        check_messages([{"role": "user", "content": parts}] * 33)


@pytest.mark.parametrize("ids", [[1, 2], (1, 2), np.array([1, 2], np.uint8)])
def test_ids(ids):
    assert check_ids(ids).tolist() == [1, 2]


@pytest.mark.parametrize("ids", [[1.5], [[1, 2]], [[1], [2, 3]], "text", [2**70], ["1"], 5, [True]])
def test_what_are_no_ids(ids):
    with pytest.raises(UserError, match="they must be a list of whole numbers"):
        check_ids(ids)


def test_limits_of_a_generation():
    assert (check_max_tokens(None), check_max_tokens(np.int64(3))) == (None, 3)
    assert (check_stop("process"), check_stop(["a", "b"]), check_stop(())) == (("process",), ("a", "b"), ())
    for value in (0, -1, 1.5, "many"):
        with pytest.raises(UserError, match=r"max_tokens is .* a whole number of at least 1"):
            check_max_tokens(value)
    for value in (5, [1], {"a"}):
        with pytest.raises(UserError, match=r"stop is .* a text or a list of texts"):
            check_stop(value)
    with pytest.raises(UserError, match="a stop text is empty"):
        check_stop(["a", ""])


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"top_k": 5.5}, "top_k is 5.5: it must be a whole number"),
        ({"temperature": "hot"}, "temperature is 'hot': it must be a number"),
        ({"temperature": float("nan")}, "temperature is nan: it must be at least 0"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"top_p": 1.5}, "top_p is 1.5: it must be at most 1"),
        ({"seed": -1}, "seed is -1: it must be at least 0"),
        ({"seed": 1.0}, "seed is 1.0: it must be a whole number"),
        ({"repetition_penalty": 0}, "greater than 0"),
        ({"warmth": 1}, "no sampling parameter warmth: choose from temperature"),
    ],
)
def test_sampling_parameters_that_make_no_sense(changes, error):
    with pytest.raises(UserError, match=error):
        Sampling().changed(**changes)


def test_changes_of_sampling_parameters():
    assert Sampling(top_k=4).changed(temperature=np.float32(0.5), seed=None) == Sampling(top_k=4, temperature=0.5)
    # Type checkers need the names in two places.
    assert list(SamplingChanges.__annotations__) == list(Sampling.__dataclass_fields__)
