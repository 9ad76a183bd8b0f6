"""`mlc-amd generate`: continues a text, as it is, without a chat template."""

import sys

from mlc_amd.runtime.errors import UserError
from mlc_amd.tools import display, models

SHORT = {"p": "prompt", "n": "max_tokens"}


def run(
    model: str | None = None,
    *,
    prompt: str,
    max_tokens: int = 256,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    repetition_window: int = 64,
    seed: int | None = None,
    stop: tuple[str, ...] = (),
    target: str = "cpu",
    arch: str = "native",
    ctx: int | None = None,
    threads: int | None = None,
    device: str | None = None,
    verify: bool = False,
) -> None:
    """Continues a text. Only the continuation goes to stdout, as it is made.

    Args:
        model: an artifact's folder or a GGUF file (compiled on first use); nothing means the bundled demo model.
        prompt: the text to continue; control tokens such as <|im_start|> are understood.
        max_tokens: stop after so many tokens.
        temperature: 0 always takes the most probable token; higher values vary more.
        top_k: choose among the k most probable tokens; 0 means all.
        top_p: choose among the most probable tokens that reach this probability together; 1 means all.
        min_p: leave out tokens less probable than this fraction of the most probable one.
        repetition_penalty: above 1, recent tokens get less probable.
        repetition_window: how many tokens count as recent.
        seed: makes a random choice repeatable.
        stop: stop before this text; may be given several times.
        target: what a GGUF file is compiled for: cpu, rocm or vulkan.
        arch: the CPU or GPU that a GGUF file is compiled for: native (this machine's) or a name, see `mlc-amd compile
            --help`.
        ctx: tokens that the KV cache holds, for a GGUF file (default: as many as the model allows, up to 4096).
        threads: CPU threads (default: all cores).
        device: the GPU, for target vulkan: its number in `mlc-amd doctor` or a part of its name (default:
            $MLC_AMD_DEVICE, or the best).
        verify: check the weights' checksum too, which reads them all.
    """
    from mlc_amd.runtime.sampling import Sampling

    if max_tokens < 1:
        raise UserError(f"--max-tokens is {max_tokens}: it must be at least 1")
    sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty, repetition_window, seed)
    engine = models.load_engine(model, target=target, arch=arch, ctx=ctx, threads=threads, device=device, verify=verify)
    ids = engine.tokenizer.encode(prompt, add_special=not engine.tokenizer.add_eos)
    try:
        for piece in engine.generate(ids, sampling, max_tokens, stop):
            display.stream(piece.text)
    finally:
        if sys.stdout.isatty():
            display.stream("\n")
    if sys.stderr.isatty():
        display.message(display.footer(engine.last, engine.position, engine.context))
