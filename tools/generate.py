"""`mlc-amd generate`: continues a text, as it is, without a chat template."""

import sys

from mlc_amd.tools import display, models, terminal
from mlc_amd.tools.monitor import Monitor

SHORT = {"p": "prompt", "n": "max_tokens"}


def run(
    model: str | None = None,
    *,
    prompt: str,
    max_tokens: int = 256,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    repetition_window: int | None = None,
    seed: int | None = None,
    stop: tuple[str, ...] = (),
    target: str = "auto",
    arch: str = "native",
    ctx: int | None = None,
    threads: int | None = None,
    device: str | None = None,
    verify: bool = False,
    n_cpu_moe: int = 0,
) -> None:
    """Continues a text. Only the continuation goes to stdout, as it is made.

    Args:
        model: artifact folder, GGUF file, or OWNER/REPO:QUANT of huggingface.co (compiled on first use); the bundled
            demo model if omitted.
        prompt: text to continue; control tokens such as <|im_start|> are parsed.
        max_tokens: maximum number of tokens to generate.
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
        stop: end the text before this one; may be repeated.
        target: target that a GGUF file is compiled for: auto (rocm if AMD's HIP runtime works, else vulkan on a GPU,
            else cpu), cpu, rocm or vulkan.
        arch: CPU, GPU or Vulkan profile that a GGUF file is compiled for: native (this machine) or a name, see
            `mlc-amd compile --help`.
        ctx: KV cache size in tokens, for a GGUF file (default: the model's context length, at most 4096).
        threads: number of CPU threads (default: all cores).
        device: GPU for targets rocm and vulkan: its number in `mlc-amd doctor`, or part of its name (default:
            $MLC_AMD_DEVICE, else the best one).
        verify: also verify the checksum of the weights, which reads all of them.
        n_cpu_moe: keep the experts of the first N layers in host memory, where the GPU reads them across the bus: for
            mixtures of experts that do not fit its memory (`mlc-amd inspect` says which N is enough).
    """
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
        threads=threads,
        device=device,
        verify=verify,
        n_cpu_moe=n_cpu_moe,
    )
    try:
        with Monitor(engine) as monitor:
            for piece in engine.generate(prompt, None, max_tokens, stop, progress=monitor.progress, **changes):
                monitor.begin()
                terminal.stream(piece.text)
    finally:
        if sys.stdout.isatty():
            terminal.stream("\n")
    if monitor.stopped:
        raise KeyboardInterrupt
    if sys.stderr.isatty():
        display.message(display.footer(engine.last, engine.position, engine.context))
