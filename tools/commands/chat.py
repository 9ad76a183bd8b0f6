"""`mlc-amd chat`: a conversation, on a terminal, through pipes, or of one question."""

import sys
from typing import Literal

from mlc_amd.runtime.cache.kv_types import KvType
from mlc_amd.tools.hub import models
from mlc_amd.tools.terminal import terminal, texts

SHORT = {"p": "prompt", "f": "file", "q": "quiet", "s": "system", "n": "max_tokens"}


def run(
    model: str | None = None,
    *,
    prompt: str | None = None,
    file: str | None = None,
    system: str | None = None,
    max_tokens: int | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    repetition_window: int | None = None,
    seed: int | None = None,
    stop: tuple[str, ...] = (),
    thinking: Literal["auto", "on", "off", "low", "medium", "high"] = "auto",
    show_thinking: bool = False,
    quiet: bool = False,
    on_full: Literal["error", "drop"] = "error",
    target: str = "auto",
    arch: str = "native",
    ctx: int | None = None,
    kv_type: KvType | None = None,
    threads: int | None = None,
    device: str | None = None,
    verify: bool = False,
    n_cpu_moe: int = 0,
    kv_memory: str | None = None,
    draft: str | None = None,
) -> None:
    """Talks with a model: type a message, Enter sends it, Ctrl-C stops an answer, Ctrl-D leaves; /help lists the rest.

    Each turn computes only what is new: the KV cache keeps the conversation. Without a terminal every line of stdin is
    a message and only answers go to stdout; a line that cannot be answered is an error, and the next one follows.

    Args:
        model: artifact folder, GGUF file, or OWNER/REPO:QUANT of huggingface.co (compiled on first use); the bundled
            demo model if omitted.
        prompt: answer this prompt and exit; "-" reads it from stdin.
        file: answer the text of this file and exit; "-" is stdin.
        system: system message, placed before the conversation.
        max_tokens: maximum length of an answer in tokens.
        temperature: divides the logits before sampling; 0 always takes the most probable token (default: the model
            file's, else 0).
        top_k: sample from the k most probable tokens only; 0 disables (default: the model file's, else 0).
        top_p: sample from the smallest set of most probable tokens with at least this total probability (default: the
            model file's, else 1, which disables it).
        min_p: ignore tokens less probable than this fraction of the most probable one; 0 disables (default: the model
            file's, else 0).
        repetition_penalty: above 1, lowers the probability of recent tokens (default: the model file's, else 1, which
            disables it).
        repetition_window: number of recent tokens that the penalty applies to (default: the model file's, else 64).
        seed: seed of the random number generator (default: a new one each time).
        stop: end an answer before this text; may be repeated.
        thinking: whether the model thinks before it answers, or how much, if its chat template has such a switch; auto
            leaves it to the template.
        show_thinking: print what the model thinks before it answers to stderr, dimmed on a terminal.
        quiet: print no greeting and no notes or statistics about answers.
        on_full: what to do when the conversation exceeds the context: report an error, or drop its oldest turns.
        target: target that a GGUF file is compiled for: auto (rocm if AMD's HIP runtime works, else vulkan on a GPU,
            else cpu), cpu, rocm or vulkan.
        arch: CPU, GPU or Vulkan profile that a GGUF file is compiled for: native (this machine) or a name, see
            `mlc-amd compile --help`.
        ctx: KV cache size in tokens, for a GGUF file (default: the model's context length, at most 4096).
        kv_type: type of the KV cache, for a GGUF file: f16, or q8_0, which takes half of the memory (default: f16).
        threads: number of CPU threads (default: all cores).
        device: GPU for targets rocm and vulkan: its number in `mlc-amd doctor`, or part of its name (default:
            $MLC_AMD_DEVICE, else the best one).
        verify: also verify the checksum of the weights, which reads all of them.
        n_cpu_moe: keep the experts of the first N layers in host memory, where the GPU reads them across the bus: for
            mixtures of experts that do not fit its memory (`mlc-amd inspect` says which N is enough).
        kv_memory: how much memory the KV cache takes, as 4G or 512M, or auto: what the device has left, of the
            host's memory half of what is available (default: one sequence of full length).
        draft: decode several tokens a step, guessed by a smaller model with the same vocabulary (named as `model` is),
            or, for "lookup", taken from the text so far, or, for "mtp", by the model's own layer for that, if it has
            one. Answers are the same; steps guess as much as pays.
    """
    text = texts.given(prompt, file)
    changes = models.sampling_changes(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        repetition_window=repetition_window,
        seed=seed,
    )
    engine = models.load_engine(
        model,
        target=target,
        arch=arch,
        ctx=ctx,
        kv_type=kv_type,
        threads=threads,
        device=device,
        verify=verify,
        n_cpu_moe=n_cpu_moe,
        kv_memory=kv_memory,
        draft=draft,
    )
    from mlc_amd.tools.terminal import repl
    from mlc_amd.tools.terminal.session import Session

    conversation = engine.conversation(system, None, on_full, thinking, **changes)
    interactive = text is None and terminal.is_terminal(sys.stdin) and terminal.is_terminal(sys.stdout)
    session = Session(conversation, max_tokens, stop, show_thinking, interactive, quiet)
    if interactive:
        repl.interact(session)
    elif text is None:
        repl.follow(session, texts.stdin())
    else:
        session.answer(text)
