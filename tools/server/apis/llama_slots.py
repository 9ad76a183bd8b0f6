"""`POST /slots/ID?action=save`, `restore` and `erase`, as in llama-server, for a server with --slot-save-path.

A slot is the number in a request's field `id_slot`, by default 0. It stands for the tokens of its last prompt and
answer. `save` writes what the KV cache has of these tokens to {"filename"}. After `restore`, prompts that begin with
these tokens need not compute them, whichever slot they have. `model`, in the query or the body, names the model of the
slots.
"""

import asyncio
import time
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from mlc_amd.runtime.cache.saved_pages import SavedSize
from mlc_amd.runtime.images.rows import Prompt
from mlc_amd.tools.server.chat_request import MOST_SLOTS
from mlc_amd.tools.server.errors import ApiError, invalid
from mlc_amd.tools.server.fields import Fields
from mlc_amd.tools.server.library import LoadedModel
from mlc_amd.tools.server.service import read_fields, service_of
from mlc_amd.tools.server.streaming import Json

_LONGEST_NAME = 200  # bytes


async def slot(request: Request) -> Response:
    service, fields = service_of(request), await read_fields(request)
    folder, action = service.options.slot_save_path, request.query_params.get("action", "")
    if folder is None:
        raise ApiError(501, "this server keeps no slots: start it with --slot-save-path", code="not_supported")
    if action not in _ACTIONS:
        raise invalid("the query's action must be save, restore or erase", "action")
    number = int(request.path_params["number"])
    if number >= MOST_SLOTS:
        raise invalid(f"there are {MOST_SLOTS} slots: number {number} is none of them", "id_slot")
    name = request.query_params.get("model", "") or fields.text("model")
    path = Path(folder) / _file_name(fields) if action != "erase" else Path(folder)
    async with service.library.use(name) as model:
        begun = time.perf_counter()
        found = await asyncio.to_thread(_ACTIONS[action], model, number, path)
        spent = {"timings": {f"{action}_ms": (time.perf_counter() - begun) * 1000}}
        return Json({"id_slot": number, **({} if action == "erase" else {"filename": path.name}), **found, **spent})


def _file_name(fields: Fields) -> str:
    fields.required("filename")
    name = fields.text("filename")
    allowed = name.isprintable() and not name.startswith(".") and set(name).isdisjoint("/\\")
    if not allowed or len(name.encode()) > _LONGEST_NAME:
        raise fields.wrong("filename", "the name of a file, without a folder")
    return name


def _save(model: LoadedModel, number: int, path: Path) -> dict[str, Any]:
    tokens = model.slots.get(number)
    if not tokens:
        raise invalid(f"slot {number} has no answer yet", "id_slot")
    model.engine.complete(tokens, max_tokens=0)  # computes what is no longer in memory
    saved = model.engine.stored.save(tokens, path)
    return {"n_saved": saved.tokens, "n_written": saved.nbytes}


def _restore(model: LoadedModel, number: int, path: Path) -> dict[str, Any]:
    found: SavedSize = model.engine.stored.open(number, path)
    model.slots.pop(number, None)
    return {"n_restored": found.tokens, "n_read": found.nbytes}


def _erase(model: LoadedModel, number: int, _: Path) -> dict[str, Any]:
    tokens = model.slots.pop(number, Prompt())
    model.engine.stored.erase(number, tokens)
    return {"n_erased": len(tokens)}


_ACTIONS = {"save": _save, "restore": _restore, "erase": _erase}
