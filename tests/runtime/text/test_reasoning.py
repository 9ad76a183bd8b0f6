"""The parts of answers, however they are divided into pieces."""

import itertools

import pytest

from mlc_amd.runtime.text.reasoning import DEFAULT, FORMATS, ReasoningFormat, detect
from mlc_amd.runtime.text.traced_text import Traced

HARMONY = FORMATS[0]
KIMI_K3 = detect(("<|open|>", "<|sep|>", "<|close|>").__contains__)
# (format, end of the prompt, answer, its parts as (kind, recipient, text))
CASES = [
    (DEFAULT, "", "Hello.", [("final", "", "Hello.")]),
    (DEFAULT, "", " \n Hello.\n", [("final", "", " \n Hello.\n")]),
    (
        DEFAULT,
        "<|im_start|>assistant\n",
        "<think>\nIs it 1 < 2?\n\nYes.\n</think>\n\nYes.\n",
        [("thinking", "", "Is it 1 < 2?\n\nYes."), ("final", "", "Yes.\n")],
    ),
    (DEFAULT, "<think>\n", "\nHm.\n</think>\n\nYes.", [("thinking", "", "Hm."), ("final", "", "Yes.")]),
    (DEFAULT, "<think>\n\n</think>\n\n", "Yes.", [("final", "", "Yes.")]),
    (DEFAULT, "", "<think>\n\n</think>\n\nYes.", [("final", "", "Yes.")]),
    (DEFAULT, "", "<think>It never ends </thin", [("thinking", "", "It never ends </thin")]),
    (DEFAULT, "", "<thi", [("final", "", "<thi")]),
    # An answer about the marks.
    (DEFAULT, "", "Write <think>x</think>.", [("final", "", "Write <think>x</think>.")]),
    (DEFAULT, "", "<think>a</think>b<think>c", [("thinking", "", "a"), ("final", "", "b<think>c")]),
    (
        detect(("<|channel>", "<channel|>").__contains__),
        "<|turn>model\n",
        "<|channel>thought\nHm.\n<channel|>Yes.",
        [("thinking", "", "Hm."), ("final", "", "Yes.")],
    ),
    (
        detect(("[THINK]", "[/THINK]").__contains__),
        "[/INST]",
        "[THINK]Hm.[/THINK]Yes [1].",
        [("thinking", "", "Hm."), ("final", "", "Yes [1].")],
    ),
    (
        detect(("<mm:think>", "</mm:think>").__contains__),
        "]~b]ai\n",
        "</mm:think>Yes.",
        [("final", "", "Yes.")],
    ),
    (
        KIMI_K3,
        "<|open|>think<|sep|>",
        "Hm <|open|>.<|close|>think<|sep|><|open|>response<|sep|>Yes.<|close|>response<|sep|><|open|>tools<|sep|>x"
        "<|close|>tools<|sep|><|close|>message<|sep|>",
        [("thinking", "", "Hm <|open|>."), ("final", "", "Yes.<|open|>tools<|sep|>x<|close|>tools<|sep|>")],
    ),
    (KIMI_K3, "", "<|open|>response<|sep|>The <|close|>tag", [("final", "", "The <|close|>tag")]),
    (
        HARMONY,
        "<|start|>assistant",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes <b>.",
        [("thinking", "", "Hm."), ("final", "", "Yes <b>.")],
    ),
    (HARMONY, "", "<|channel|>final <|constrain|>json<|message|>{}", [("final", "", "{}")]),
    (
        HARMONY,
        "",
        "<|channel|>commentary<|message|>First.<|end|><|start|>assistant<|channel|>commentary to=functions.f "
        '<|constrain|>json<|message|>{"a": 1}',
        [("thinking", "", "First."), ("tool", "functions.f", '{"a": 1}')],
    ),
    (HARMONY, "", " to=functions.g<|channel|>commentary json<|message|>{}", [("tool", "functions.g", "{}")]),
    # What gpt-oss sometimes does: a channel that is not used, a message without an end, no format at all.
    (
        HARMONY,
        "",
        "<|channel|>commentary to=assistant<|channel|>analysis<|message|>Hm.<|channel|>final<|message|>Yes.",
        [("thinking", "", "Hm."), ("final", "", "Yes.")],
    ),
    (HARMONY, "", "Just text.", [("final", "", "Just text.")]),
    (HARMONY, "", "<|channel|>analy", []),
    (HARMONY, "", "<|channel|>analysis<|message|>Hm. <|en", [("thinking", "", "Hm. <|en")]),
]


def parts(found: ReasoningFormat, prompt: str, pieces: list[str]) -> list[tuple[str, str, str]]:
    parser = found.parser(prompt)
    made = [part for piece in pieces for part in parser.feed(piece)] + parser.finish()
    assert all(part.text for part in made)
    runs = itertools.groupby(made, key=lambda part: (part.kind, part.recipient))
    return [(*key, "".join(part.text for part in run)) for key, run in runs]


@pytest.mark.parametrize(("found", "prompt", "answer", "expected"), CASES)
def test_parts(found, prompt, answer, expected):
    assert parts(found, prompt, [answer]) == expected
    assert parts(found, prompt, list(answer)) == expected
    for at in range(len(answer)):
        assert parts(found, prompt, [answer[:at], "", answer[at:]]) == expected


# (format, end of the prompt, thought, the prompt after it with the answer's text TEXT)
TEXT = "Write <think>"
BEGUN = [
    (DEFAULT, "A", "", "A{}"),
    (DEFAULT, "A", "</think>", "A<think>\n{}\n</think>\n\n{}"),
    (DEFAULT, "A<think>\n", "", "A<think>\n\n</think>\n\n{}"),
    (DEFAULT, "A<think>\n", "Hm.", "A<think>\n{}\n</think>\n\n{}"),
    (DEFAULT, "A<think>\n\n</think>\n\n", "Hm.", "A<think>\n\n</think>\n\n{}"),
    (HARMONY, "<|start|>assistant", "", "<|start|>assistant<|channel|>final<|message|>{}"),
    (
        HARMONY,
        "<|start|>assistant",
        "<|end|>",
        "<|start|>assistant<|channel|>analysis<|message|>{}<|end|><|start|>assistant<|channel|>final<|message|>{}",
    ),
]


@pytest.mark.parametrize(("found", "prompt", "thought", "expected"), BEGUN)
def test_begun_answers_are_continued_in_their_text(found, prompt, thought, expected):
    """What the client says of the answer's beginning becomes no mark, and what follows is no thinking."""
    made = found.begun(Traced.all_own(prompt), thought, TEXT)
    assert made == expected.format(*[thought, TEXT][-expected.count("{}") :])
    own = "".join(made[start:stop] for start, stop in made.spans())
    assert own == expected.replace("{}", "")
    parser = found.parser(made, continued=True)
    assert [(part.kind, part.text) for part in [*parser.feed(" <think>x"), *parser.finish()]] == [
        ("final", " <think>x")
    ]


def test_parts_come_as_early_as_they_are_certain():
    parser = DEFAULT.parser("")
    assert [part.text for part in parser.feed("Hel")] == ["Hel"]
    parser = DEFAULT.parser("")
    assert [part.text for part in parser.feed("<think>Hm. </")] == ["Hm."]
    assert [part.text for part in parser.feed("b")] == [" </b"]


@pytest.mark.parametrize(
    ("vocabulary", "expected"),
    [
        ((), DEFAULT),
        (("<think>", "</think>"), DEFAULT),
        (("<|channel|>", "<|message|>"), DEFAULT),  # not all of Harmony's marks
        (HARMONY.marks, HARMONY),
    ],
)
def test_the_vocabulary_tells_the_format(vocabulary, expected):
    assert detect(vocabulary.__contains__) is expected
