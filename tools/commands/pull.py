"""`mlc-amd pull`: downloads a hub's model, and prints the path of its GGUF file in the hub's cache."""

import re
from typing import Annotated

from mlc_amd.runtime.errors import UsageError, UserError
from mlc_amd.runtime.options import CompileOptions, option_of
from mlc_amd.tools.hub import hub, hub_files
from mlc_amd.tools.terminal import display


def run(
    model: str | None = None,
    *,
    list: bool = False,
    no_mmproj: Annotated[bool, option_of(CompileOptions, "no_mmproj")] = False,
) -> None:
    """Downloads a model from huggingface.co and prints the path of its GGUF file, for a split one that of its first
    part.

    All commands take such a name in place of a file, and download what is not in the cache; `pull` also fetches what is
    newer on the hub. A download that was interrupted is continued.

    HF_TOKEN gives access to gated and private models, HF_HUB_CACHE is the folder of the cache (default:
    ~/.cache/huggingface/hub), HF_ENDPOINT is another hub, and HF_HUB_OFFLINE=1 takes what is in the cache.

    Args:
        model: OWNER/REPO or OWNER/REPO:QUANT, such as bartowski/Qwen3-8B-GGUF:Q4_K_M. Without QUANT it is Q4_K_M, else
            Q8_0, else the first model. QUANT may be any part of the file's name.
        list: list the repository's models and their sizes instead.
    """
    if model is None:
        what = (
            "lists what a repository has: write `mlc-amd pull OWNER/REPO --list`" if list else "needs OWNER/REPO:QUANT"
        )
        raise UsageError(f"{'--list' if list else 'pull'} {what}; `mlc-amd list` shows what was downloaded")
    name = hub_files.parse(model)
    if name is None:
        why = "models of ollama's registry come with `ollama pull`, and are found then; " * _of_ollama(model)
        raise UserError(f"{model} is no model of huggingface.co: {why}write OWNER/REPO or OWNER/REPO:QUANT")
    if not list:
        print(hub.pull(name, not no_mmproj))
        return
    available = hub.listing(name.repo)
    found = [one for one in available if name.quant is None or one.fits(name.quant)]
    rows = [(one.quant, display.size(one.size), one.count, one.title) for one in found]
    if not rows:
        hub_files.choose(name, available)  # the error lists what there is
    print(display.table(("quant", "size", "files", "name"), rows, right=(1, 2)), end="")


def _of_ollama(text: str) -> bool:
    """Whether a text looks like a name in ollama: llama3, llama3:8b."""
    return re.fullmatch(r"[\w.-]+(:[\w.-]+)?", text) is not None and not text.endswith(".gguf")
