"""`mlc-amd cache`: lists and removes the compiled models in the user's cache, and what is kept of their KV caches."""

import os
import time
from collections import Counter
from dataclasses import asdict
from datetime import datetime
from fnmatch import fnmatch
from json import dumps
from pathlib import Path
from typing import Literal

from mlc_amd.runtime.cache import page_files
from mlc_amd.runtime.errors import UsageError, UserError
from mlc_amd.runtime.quantities import BYTES, number
from mlc_amd.tools.hub import hub, model_cache, models, page_cache
from mlc_amd.tools.hub.model_cache import Entry, Recipe
from mlc_amd.tools.options import Json
from mlc_amd.tools.terminal import display

_TIMES = {"h": 3600, "d": 86400, "w": 604800}


def run(
    action: Literal["ls", "ps", "rm", "prune"] = "ls",
    name: str | None = None,
    *,
    older: str | None = None,
    max_size: str | None = None,
    all: bool = False,
    dry_run: bool = False,
    json: Json = False,
) -> None:
    """Lists or removes models that were compiled on first use. They are compiled again when they are needed.

    Models of one file that differ in context, tuning or version share their packed weights, which take disk space once.
    What a running process uses is never removed. With a model goes what --cache-disk keeps of its KV cache.

    Args:
        action: ls lists the models; ps those in use; rm removes those of that name; prune removes those that no
            command would find any more (their file has changed or is gone, another version compiled them), KV caches
            of models that are gone, and what --older and --max-size say.
        name: for rm: a name as ls shows it, a pattern such as 'llama-*', or what the model was compiled from.
        older: for prune: also what was not used for so long, as 12h, 30d or 8w, of models and of KV caches.
        max_size: for prune: also the least recently used models, until the others take at most so much, as 500M or 20G.
        all: for rm: all models.
        dry_run: only say what would be removed.
    """
    for flag, given, of in (
        ("NAME", name is not None, ("rm",)),
        ("--all", all, ("rm",)),
        ("--older", older is not None, ("prune",)),
        ("--max-size", max_size is not None, ("prune",)),
        ("--json", json, ("ls", "ps")),
    ):
        if given and action not in of:
            raise UsageError(f"{flag} is for `mlc-amd cache {of[0]}`")
    age = None if older is None else number(older, "--older", _TIMES, "30d")
    limit = None if max_size is None else number(max_size, "--max-size", BYTES, "20G")
    found = model_cache.entries()
    if action in ("ls", "ps"):
        found = [entry for entry in found if action == "ls" or entry.in_use]
        print(dumps([_facts(entry) for entry in found], indent=1) if json else _listing(found, action == "ls"))
    elif action == "rm":
        _remove(_named(found, name, all), dry_run)
    else:
        _remove(model_cache.to_prune(found, time.time(), age, limit), dry_run, age)


def _named(found: list[Entry], name: str | None, all: bool) -> list[Entry]:
    if all == (name is not None):
        raise UsageError("give the NAME of a model as `mlc-amd cache ls` shows it, or --all")
    if all:
        return found
    assert name is not None, "one of both is given"
    if chosen := [entry for entry in found if fnmatch(entry.name, name)]:
        return chosen
    file = models.local(name)
    chosen = [entry for entry in found if entry.recipe and _made_from(entry.recipe, name, file)]
    if file and not file.is_dir():
        display.message(f"only what was compiled is removed; the model's file stays: {file}")
    elif not chosen:
        raise UserError(f"no model in the cache is called {name}; `mlc-amd cache ls` lists them")
    return chosen


def _made_from(recipe: Recipe, name: str, file: Path | None) -> bool:
    """Whether a model was compiled from this file, or is the synthetic one with this name."""
    return recipe.title == name or (file is not None and recipe.path == os.path.abspath(file))


# ---- ls


def _facts(entry: Entry) -> dict[str, object]:
    own = str(entry.folder.resolve())
    return {
        "name": entry.name,
        "path": str(entry.folder),
        "recipe": asdict(entry.recipe) if entry.recipe else None,
        "used": entry.used,
        "bytes": entry.nbytes,
        "weights_bytes": entry.shared,
        "weights_inode": entry.inode,
        "pages_bytes": sum(cache.nbytes for cache in page_cache.stored() if cache.path == own),
        "in_use": entry.in_use,
        "outdated": entry.outdated,
    }


def _listing(found: list[Entry], whole: bool) -> str:
    """The text of `ls`. whole: whether `found` is all models."""
    place = model_cache.models_directory()
    if not whole and not found:
        return "no model is in use"
    if not found:
        return f"{place}: no models{_pages()}{_downloads()}"
    links = Counter(entry.inode for entry in found)
    rows = []
    for entry in found:
        shared = f" (shared by {links[entry.inode]})" if links[entry.inode] > 1 else ""
        state = ", ".join(word for word, holds in (("in use", entry.in_use), ("outdated", entry.outdated)) if holds)
        ctx = entry.recipe.ctx or "default" if entry.recipe else ""
        weights = display.size(entry.shared) + shared
        rows.append([entry.name, ctx, weights, display.size(entry.nbytes), _time(entry.used), state])
    table = display.table(["model", "ctx", "weights", "kernels etc.", "last use", ""], rows, right=(1, 3))
    unused = whole and sum(nbytes for _, nbytes in model_cache.unused_weights())
    more = f", {display.size(unused)} of weights that no model has (prune removes them)" if unused else ""
    models = f"{len(found)} model{'s' * (len(found) > 1)}"
    others = _pages() + _downloads() if whole else ""
    return f"{table}{models}, {display.size(model_cache.total(found))}{more}, in {place}{others}"


def _pages() -> str:
    """What is kept of KV caches: lines that follow those of the models."""
    found = page_cache.stored()
    rows = "".join(
        f"\n  {cache.name or cache.folder.name} ({display.size(cache.nbytes)}, last used {_time(cache.used)})"
        for cache in found
    )
    return f"\nKV caches, in {page_files.pages_directory()}:{rows}" if found else ""


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")


def _downloads() -> str:
    """The models in the hub's cache, compiled or not: lines that follow the others."""
    found = hub.downloaded()
    rows = "".join(f"\n  {name} ({display.size(nbytes)})" for name, nbytes in found)
    return f"\ndownloaded, in {hub.cache()}:{rows}" if found else ""


# ---- rm, prune


def _remove(chosen: list[Entry], dry_run: bool, age: float | None = None) -> None:
    """Removes models and their KV caches. Writes what is removed to stdout, and what is in use to stderr. age: also
    removes KV caches that were not used for so many seconds."""
    before, removed = _disk(), []
    for entry in chosen:
        if entry.in_use if dry_run else not model_cache.remove(entry):
            display.message(f"{entry.name} is in use: it stays")
        else:
            removed.append(entry.folder)
            print(f"{'would remove' if dry_run else 'removed'} {entry.name}")
    if pages := page_cache.unneeded(removed, age):
        count = display.size(sum(file.nbytes for file in pages))
        print(f"{'would remove' if dry_run else 'removed'} {count} of KV caches")
    if not dry_run:
        model_cache.drop_unused_weights()
        page_cache.drop(pages)
        print(f"{display.size(before - _disk())} freed")


def _disk() -> int:
    """Bytes of all models, weights and KV caches."""
    weights = sum(nbytes for _, nbytes in model_cache.unused_weights())
    return model_cache.total(model_cache.entries()) + weights + page_cache.total()
