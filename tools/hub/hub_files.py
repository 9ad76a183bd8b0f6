"""Determines which file of a hub's repository a name refers to.

In: a name, OWNER/REPO or OWNER/REPO:QUANT, possibly with what browsers and other programs add to it; and the
repository's files. Out: the repository's models, and the model of that name. This module accesses neither disk nor
network. The rules are those of llama.cpp's `-hf` (common/download.cpp), except that it takes the first of several
models that fit a QUANT, while this module raises UserError.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from urllib.parse import unquote

from mlc_amd.runtime.errors import UserError
from mlc_amd.tools.terminal import display

# huggingface_hub's rules for repositories: at most 96 characters, without "--" and "..".
_NAME = re.compile(r"(?!.{97})(?![^:]*(?:--|\.\.))([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::([\w./-]+))?", re.ASCII)
# What addresses and other programs add before OWNER/REPO; what they add after it, before the path of a file.
_HOST = re.compile(r"(?:hf://|(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/)", re.IGNORECASE)
_FILE = re.compile(r"([^/]+/[^/:]+)/(?:(?:blob|resolve|raw|tree)/[^/]+/?)?(.*)")
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})")  # llama.cpp's LLAMA_SPLIT_PREFIX format
_QUANT = re.compile(r"[-.]((?:UD-)?[A-Z0-9_]+)$", re.IGNORECASE)  # UD: unsloth's "dynamic" files
# parts of the names of files that are no models, as in llama.cpp
_NO_MODELS = ("mmproj", "imatrix", "mtp-", "eagle3-", "dflash-", "dspark-")
_DEFAULTS = ("Q4_K_M", "Q8_0")  # without a QUANT, the first of these that exists is used
_LISTED = 40  # limit of the models that a message lists


@dataclass(frozen=True)
class Name:
    """repo: OWNER/REPO. quant: a part of the file's name that selects the file; None if it is not given."""

    repo: str
    quant: str | None = None

    def __str__(self) -> str:
        return f"{self.repo}:{self.quant}" if self.quant else self.repo


@dataclass(frozen=True)
class File:
    """path: relative to the repository's root. size: bytes. sha256: hexadecimal; None if unknown."""

    path: str
    size: int
    sha256: str | None = None


@dataclass(frozen=True)
class Model:
    """A GGUF file, or the parts of a split one. title: its path without the parts' numbers and the suffix. parts: files
    by number, from 0. count: number of parts, including missing ones."""

    title: str
    parts: dict[int, File]
    count: int

    @property
    def quant(self) -> str:
        """The end of its file name, in capital letters: "Q4_K_M". The whole title if the name has no such end."""
        found = _QUANT.search(self.title)
        return found[1].upper() if found else self.title

    @property
    def size(self) -> int:
        """Bytes of the parts that exist."""
        return sum(file.size for file in self.parts.values())

    @property
    def missing(self) -> list[int]:
        """The numbers, from 0, of the missing parts."""
        return [number for number in range(self.count) if number not in self.parts]

    def fits(self, quant: str) -> bool:
        """Whether a path of the model has `quant` in it: from the beginning of a word to a "-" or "."."""
        text = re.escape(quant.removesuffix(".gguf"))
        word = re.compile(rf"(?<![A-Za-z0-9]){text}[.-]", re.IGNORECASE)
        return any(word.search(file.path) for file in self.parts.values())


def parse(text: str) -> Name | None:
    """Parses a name, or the address of a repository's page or file. Returns None for a text that can only be a path."""
    host = _HOST.match(text)
    if host:
        text = unquote(re.split(r"[?#]", text[host.end() :])[0]).rstrip("/").removesuffix(":latest")
        file = _FILE.fullmatch(text)
        text = f"{file[1]}:{file[2]}".rstrip(":") if file else text
    match = _NAME.fullmatch(text)
    if not match or (not host and match[2] is None and text.lower().endswith(".gguf")):
        return None
    return Name(match[1], match[2])


def models(files: Iterable[File]) -> list[Model]:
    """The models among a repository's files, by title."""
    found: dict[tuple[str, int], dict[int, File]] = {}
    for file in files:
        path = PurePosixPath(file.path)
        if path.suffix != ".gguf" or any(word in path.name for word in _NO_MODELS):
            continue
        stem = str(path.with_suffix(""))
        part = _PART.fullmatch(stem)
        title, number, count = (part[1], int(part[2]) - 1, int(part[3])) if part else (stem, 0, 1)
        found.setdefault((title, count), {})[number] = file
    return [Model(title, parts, count) for (title, count), parts in sorted(found.items())]


def candidates(quant: str | None, among: Sequence[Model]) -> list[Model]:
    """The models that `quant` may refer to: none, one, or several if it is ambiguous."""
    for wanted in (quant,) if quant else _DEFAULTS:
        found = [model for model in among if model.fits(wanted)]
        exact = [model for model in found if model.quant == wanted.upper()]
        if found:
            return exact if len(exact) == 1 else found
    return [] if quant else list(among[:1])


def choose(name: Name, among: Sequence[Model]) -> Model:
    """The model that `name` refers to. If there is none, or several, raises a UserError that lists the models."""
    if not among:
        raise UserError(f"{name.repo} has no GGUF file: look for a repository with GGUF in its name")
    found = candidates(name.quant, among)
    if not found:
        raise UserError(f"{name.repo} has no {name.quant}; it has {_listed(among)}")
    if len(found) > 1:
        example = f"{name.repo}:{found[0].title}"
        raise UserError(f"{name} may mean {_listed(found)}: give more of its name, such as {example}")
    return found[0]


def _listed(among: Sequence[Model]) -> str:
    quants = [model.quant for model in among]
    unique = len(set(quants)) == len(quants)
    names = [f"{model.quant if unique else model.title} ({display.size(model.size)})" for model in among[:_LISTED]]
    return ", ".join(names) + (f" and {len(among) - _LISTED} more" if len(among) > _LISTED else "")
