"""`mlc-amd generate`: continues a text without a chat template."""

import sys
from typing import Annotated, Any

from mlc_amd.runtime.errors import UsageError, UserError
from mlc_amd.runtime.options import LoadOptions
from mlc_amd.tools.answer_grammar import AnswerGrammar, GrammarOptions
from mlc_amd.tools.hub import models
from mlc_amd.tools.options import File, Images, MaxTokens, Option, Prompt, Quiet, SamplingFlags, Stop, Without
from mlc_amd.tools.terminal import display, terminal, texts
from mlc_amd.tools.terminal.monitor import Monitor

SHORT = {"p": "prompt", "f": "file", "q": "quiet", "n": "max_tokens"}


def run(
    *,
    prompt: Prompt = None,
    file: File = None,
    suffix: Annotated[str | None, Option("write what comes between the text and this one, by a model for code")] = None,
    image: Images = (),
    max_tokens: MaxTokens = 256,
    stop: Stop = (),
    quiet: Quiet = False,
    grammar: GrammarOptions,
    sampling: SamplingFlags,
    load: Annotated[LoadOptions, Without("tuned", "kv_tokens", "cache_disk")],
) -> None:
    """Continues a text. Only the continuation goes to stdout, as it is made.

    Without --prompt and --file, the text is what is piped into the command. Control tokens in it, such as
    <|im_start|>, are parsed. A newline at the end of stdin or of a file is no part of it. Images come before the text,
    or in the places of <image>, if it has that once for each.
    """
    if suffix and image:
        raise UsageError("give --image or --suffix, not both")
    text, wanted = texts.required(prompt, file), AnswerGrammar(grammar)
    pictures = texts.pictures(image)
    engine = models.load_engine(load, sees=bool(pictures))
    from mlc_amd.runtime.engine.generation import ContextFull

    given = engine.fill.prompt(text, suffix) if suffix else engine.images.prompt(text, pictures)
    try:
        with Monitor(engine) as monitor, wanted.of(engine) as constrain:
            options: Any = sampling | {"constraint": constrain and constrain(None)}
            options |= {"stop_ids": engine.fill.stop_ids} if suffix else {}
            for piece in engine.generate(given, None, max_tokens, stop, progress=monitor.progress, **options):
                monitor.begin()
                terminal.stream(piece.text)
    except ContextFull as error:
        raise UserError(f"{error.what}: shorten the prompt, or use a larger --ctx") from error
    finally:
        if terminal.is_terminal(sys.stdout):
            terminal.stream("\n")
    if monitor.stopped:
        raise KeyboardInterrupt
    if terminal.is_terminal(sys.stderr) and not quiet:
        parts = display.statistics(engine.last, engine.context)
        display.message(display.footer(parts, terminal.width() - 1), dimmed=True)
    if engine.last.finish == "context":
        raise UserError(f"the text was cut off: the context of {engine.context} tokens is full; use a larger --ctx")
