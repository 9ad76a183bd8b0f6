"""Finds models that ollama has on this machine.

In: a name in ollama's form: llama3, llama3:8b, OWNER/MODEL:TAG or HOST/OWNER/MODEL:TAG. Out: the path of its GGUF file,
which is one of ollama's blobs. Nothing is downloaded or written.

ollama's folder ($OLLAMA_MODELS, else the user's or that of its service) has `manifests/HOST/OWNER/MODEL/TAG`: JSON that
lists layers by the digests of their blobs.
"""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from mlc_amd.runtime.errors import UserError

_PART = re.compile(r"(?!\.)[\w.-]+", re.ASCII)
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_PLACE = ("registry.ollama.ai", "library")  # host and owner of names without these
_SERVICE = ("/usr/share/ollama", "/var/lib/ollama")  # home folders of the service's user in Linux packages


def find(text: str) -> Path | None:
    """The GGUF file of the model with this name in ollama; None if ollama has no such model. Raises UserError for a
    model that is not a single GGUF file, and for one that this user may not read."""
    name, _, tag = text.partition(":")
    parts = [*name.split("/"), tag or "latest"]
    if len(parts) > 4 or not all(map(_PART.fullmatch, parts)):
        return None
    place = Path(*_PLACE[: 4 - len(parts)], *parts)
    for folder in _folders():
        try:
            if (folder / "manifests" / place).is_file():
                return _blob(folder, json.loads((folder / "manifests" / place).read_text())["layers"], text)
        except PermissionError:
            raise UserError(
                f"{folder}: permission to read ollama's models is denied; copy the file of {text}"
            ) from None
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{folder / 'manifests' / place} is damaged; `ollama pull {text}` repairs it") from error
    return None


def _blob(folder: Path, layers: list[dict[str, str]], text: str) -> Path:
    digests = {layer["mediaType"].rpartition(".")[2]: layer["digest"] for layer in reversed(layers)}
    if "adapter" in digests:
        raise UserError(f"ollama's {text} has an adapter (LoRA), which is not supported: take the model that it is for")
    if not _DIGEST.fullmatch(digests.get("model", "")):
        raise UserError(f"ollama's {text} has no GGUF file; `mlc-amd pull OWNER/REPO:QUANT` downloads another model")
    blob = folder / "blobs" / digests["model"].replace(":", "-")
    if not blob.exists():
        raise UserError(f"{blob}, the file of ollama's {text}, is missing; `ollama pull {text}` downloads it")
    return blob


def _folders() -> Iterator[Path]:
    if given := os.environ.get("OLLAMA_MODELS"):
        yield Path(given)
        return
    for home in (Path.home(), *map(Path, _SERVICE)):
        yield home / ".ollama" / "models"
