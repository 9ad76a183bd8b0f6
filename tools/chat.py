"""`mlc-amd chat`: a conversation, on a terminal, through pipes, or of one question."""

import io
import sys
from typing import Literal

from mlc_amd.runtime.errors import UserError
from mlc_amd.tools import display, models

SHORT = {"p": "prompt", "s": "system", "n": "max_tokens"}


def run(
    model: str | None = None,
    *,
    prompt: str | None = None,
    system: str | None = None,
    max_tokens: int | None = None,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    repetition_window: int = 64,
    seed: int | None = None,
    stop: tuple[str, ...] = (),
    on_full: Literal["error", "drop"] = "error",
    target: str = "cpu",
    arch: str = "native",
    ctx: int | None = None,
    threads: int | None = None,
    device: str | None = None,
    verify: bool = False,
) -> None:
    """Talks with a model: type a message, Enter sends it, Ctrl-C stops an answer, Ctrl-D leaves; /help lists the rest.

    Each turn computes only what is new: the KV cache keeps the conversation. Without a terminal every line of stdin is
    a message and only answers go to stdout.

    Args:
        model: an artifact's folder or a GGUF file (compiled on first use); nothing means the bundled demo model.
        prompt: answer this and exit. system: instructions that the model gets before the conversation. max_tokens: stop
        an answer after so many tokens. temperature: 0 always takes the most probable token; higher values vary more.
        top_k: choose among the k most probable tokens; 0 means all. top_p: choose among the most probable tokens that
        reach this probability together; 1 means all. min_p: leave out tokens less probable than this fraction of the
        most probable one. repetition_penalty: above 1, recent tokens get less probable. repetition_window: how many
        tokens count as recent. seed: makes random choices repeatable. stop: stop an answer before this text; may be
        given several times. on_full: when the conversation outgrows the context, say so (error) or forget its oldest
        turns (drop). target: what a GGUF file is compiled for: cpu, rocm or vulkan. arch: the CPU or GPU that a GGUF
        file is compiled for: native (this machine's) or a name, see `mlc-amd compile --help`. ctx: tokens that the KV
        cache holds, for a GGUF file (default: as many as the model allows, up to 4096). threads: CPU threads (default:
        all cores). device: the GPU, for target vulkan: its number in `mlc-amd doctor` or a part of its name (default:
        $MLC_AMD_DEVICE, or the best). verify: check the weights' checksum too, which reads them all.
    """
    from mlc_amd.runtime.sampling import Sampling

    if max_tokens is not None and max_tokens < 1:
        raise UserError(f"--max-tokens is {max_tokens}: it must be at least 1")
    sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty, repetition_window, seed)
    engine = models.load_engine(model, target=target, arch=arch, ctx=ctx, threads=threads, device=device, verify=verify)
    from mlc_amd.runtime.chat import Conversation
    from mlc_amd.tools import repl

    conversation = Conversation(engine, system, sampling, on_full)
    session = repl.Session(conversation, max_tokens, stop)
    if prompt is not None:
        session.answer(prompt)
        if sys.stderr.isatty():
            display.message(session.footer())
    elif sys.stdin.isatty() and sys.stdout.isatty():
        repl.interact(session)
    else:
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(encoding="utf-8", errors="replace")
        repl.follow(session, sys.stdin)
