"""The sources of guesses (`speculation.Drafter`) by their names for users."""

from os import PathLike
from pathlib import Path

from mlc_amd.runtime.artifact.artifact import Artifact
from mlc_amd.runtime.cache.kv_pool import KvSize
from mlc_amd.runtime.devices.opening import open_device
from mlc_amd.runtime.speculation.draft_model import DraftModel
from mlc_amd.runtime.speculation.prompt_lookup import PromptLookup
from mlc_amd.runtime.speculation.speculation import Drafter
from mlc_amd.runtime.text.tokenizer import Tokenizer

LOOKUP, OWN = "lookup", "mtp"


def open_drafter(
    draft: str | PathLike[str] | None, tokenizer: Tokenizer, device: str | None, threads: int | None, size: KvSize
) -> Drafter | None:
    """draft: LOOKUP, the artifact folder of a draft model, or None, but not OWN (`Engine.own_draft`); device, threads,
    size: of its device and its cache, as for `open_device`; tokenizer: of the main model. UserError if the draft model
    cannot be used."""
    if draft is None:
        return None
    if draft == LOOKUP:
        return PromptLookup()
    artifact = Artifact.open(Path(draft))
    return DraftModel(artifact, open_device(artifact, device, threads, 0, size), tokenizer)
