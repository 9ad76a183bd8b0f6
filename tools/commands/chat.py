"""`mlc-amd chat`: a conversation, on a terminal, through pipes, or of one question."""

import sys
from typing import Annotated

from mlc_amd.runtime.options import LoadOptions, Option
from mlc_amd.tools.answer_grammar import AnswerGrammar, GrammarOptions
from mlc_amd.tools.hub import models
from mlc_amd.tools.options import ChatOptions, File, Images, Prompt, SamplingFlags, Without
from mlc_amd.tools.terminal import terminal, texts

SHORT = {"p": "prompt", "f": "file", "q": "quiet", "s": "system", "n": "max_tokens"}


def run(
    *,
    prompt: Prompt = None,
    file: File = None,
    image: Images = (),
    system: Annotated[str | None, Option(
        "system message, placed before the conversation", also=("-sys", "--system-prompt"))] = None,
    options: ChatOptions,
    grammar: GrammarOptions,
    sampling: SamplingFlags,
    load: Annotated[LoadOptions, Without("tuned", "kv_tokens")],
) -> None:  # fmt: skip
    """Talks with a model: type a message, Enter sends it, Ctrl-C stops an answer, Ctrl-D leaves; /help lists the rest.

    Each turn computes only what is new: the KV cache keeps the conversation. With --prompt or --file, it answers that
    text and exits. Without a terminal every line of stdin is a message and only answers go to stdout; a line that
    cannot be answered is an error, and the next one follows.
    """
    text, wanted = texts.given(prompt, file), AnswerGrammar(grammar)
    pictures = texts.pictures(image)
    # what is still to be written of the cache is written at the end
    with models.load_engine(load, sees=bool(pictures)) as engine:
        from mlc_amd.tools.terminal import session as sessions

        conversation = engine.conversation(system, None, options.on_full, options.thinking, **sampling)
        interactive = text is None and terminal.is_terminal(sys.stdin) and terminal.is_terminal(sys.stdout)
        session = sessions.Session(conversation, options, interactive)
        session.add_images(pictures)
        with wanted.of(engine) as conversation.constrain:
            if interactive:
                sessions.interact(session)
            elif text is None:
                sessions.follow(session, texts.stdin())
            else:
                session.answer(text)
