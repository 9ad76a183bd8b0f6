"""Conversations with a model that thinks. The bundled model does not: here a part of its answer counts as thinking,
because the end of its prompt counts as the mark before it, and one of its words as the mark after it."""

import pytest

from mlc_amd.runtime.engine.chat import Conversation
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.text.chat_template import ChatTemplate
from mlc_amd.runtime.text.reasoning import FORMATS, Tags
from mlc_amd.tools.options import ChatOptions
from mlc_amd.tools.terminal.session import Session

QUESTION = "What does os.path.join do?"
MARK = "<|im_start|>assistant"


@pytest.fixture
def whole(engine) -> str:
    """What the model writes to QUESTION."""
    answer = "".join(Conversation(engine).chat(QUESTION, max_tokens=24))
    engine.reset()
    return answer


@pytest.fixture
def thinker(engine, whole) -> Conversation:
    """A conversation in which the text before the fourth word is thinking."""
    conversation = Conversation(engine)
    conversation.format = Tags((MARK, whole.split()[3]))
    return conversation


def test_history_holds_only_the_answer(thinker, whole):
    thought, final = (text.strip() for text in whole.split(whole.split()[3], 1))
    parts = list(thinker.stream(QUESTION, max_tokens=24))
    assert "".join(part.text for part in parts if part.kind == "thinking") == thought
    assert "".join(part.text for part in parts if part.kind == "final").strip() == final
    assert [m["content"].strip() for m in thinker.messages] == [QUESTION, final]
    again = "".join(thinker.chat("And os.path.split?", max_tokens=24))
    # The second turn is that of a conversation in which the first answer was given without thinking.
    fresh = Conversation(thinker.engine)
    fresh.format, fresh.messages = thinker.format, thinker.messages[:2]
    thinker.engine.reset()
    assert "".join(fresh.chat("And os.path.split?", max_tokens=24)) == again


def test_an_answer_that_ends_within_the_thinking_changes_nothing(thinker, capsys):
    session = Session(thinker, ChatOptions(max_tokens=2))
    session.answer(QUESTION)
    shown = capsys.readouterr()
    assert shown.out == "\n" and "still thinking" in shown.err and thinker.messages == []
    parts = thinker.stream(QUESTION)
    assert next(parts).kind == "thinking"
    parts.close()
    assert thinker.messages == []


@pytest.mark.parametrize("show", [False, True])
def test_thinking_goes_to_stderr_if_it_is_shown(thinker, whole, capsys, show):
    thought, final = (text.strip() for text in whole.split(whole.split()[3], 1))
    Session(thinker, ChatOptions(max_tokens=24, show_thinking=show)).answer(QUESTION)
    shown = capsys.readouterr()
    assert shown.out.strip() == final
    assert shown.err == (f"{thought}\n\n" if show else "") + "(cut off: max_tokens is 24)\n"


def test_marks_that_are_control_tokens_are_found(engine):
    # The prompt forces the beginning of a message, whose mark <|im_start|> the vocabulary has as a control token.
    ids = engine.tokenizer.encode(f"<|im_start|>user\n{QUESTION}<|im_end|>\n")
    forced = engine.tokenizer.encode("<|im_start|>")[0]
    assert engine.tokenizer.stream(shown=("<|im_start|>",)).push(forced) == "<|im_start|>"
    assert engine.tokenizer.stream().push(forced) == ""
    assert engine.tokenizer.has_token("<|im_start|>") and not engine.tokenizer.has_token(FORMATS[0].marks[0])
    assert [piece.text for piece in engine.generate(ids, max_tokens=1, shown=("<|im_start|>",))] == ["<|im_start|>"]


def test_switches(engine, monkeypatch, capsys):
    with pytest.raises(UserError, match="thinking cannot be off: with this model's chat template it is auto"):
        Conversation(engine, thinking="off")
    source = engine.chat_template.source + "{% if enable_thinking is false %}None.{% endif %}"
    monkeypatch.setattr(engine, "chat_template", ChatTemplate(source, {}))
    prompts, generate = [], engine.generate
    monkeypatch.setattr(engine, "generate", lambda ids, *a, **k: (prompts.append(ids), generate(ids, *a, **k))[1])
    session = Session(Conversation(engine), ChatOptions(max_tokens=1))
    for command in ("/set thinking off", "/set show_thinking on", "/set"):
        session.handle(command)
    shown = capsys.readouterr().err
    assert "  thinking            off\n" in shown and "  show_thinking       on\n" in shown
    session.answer(QUESTION)
    assert engine.tokenizer.decode(prompts[-1]).endswith("assistant\nNone.")
    with pytest.raises(
        UserError, match="thinking cannot be maybe: with this model's chat template it is auto, on, off"
    ):
        session.handle("/set thinking maybe")
    with pytest.raises(UserError, match="thinking cannot be low"):
        session.handle("/set thinking low")
