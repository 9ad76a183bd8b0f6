"""The models of a server: loaded when a request needs one, unloaded when nobody does.

In: names and how to load each. Out: `Library.use(name)`, a loaded model that stays loaded for the `async with` block.

Where there would be more than `most` models, or the memory is too small for one more, the ones that were not used for
the longest time are unloaded first; never one with answers in progress. Loading and closing run in threads; one model
is loaded at a time, and requests for others go on meanwhile.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress

from mlc_amd.runtime.engine.engine import Engine
from mlc_amd.runtime.errors import UserError
from mlc_amd.tools.server.errors import ApiError, overloaded
from mlc_amd.tools.server.loaded_model import LoadedModel
from mlc_amd.tools.terminal import display

# What the errors of too little memory begin with (runtime/artifact/memory.py).
_SHORTAGES = ("out of GPU memory", "out of host memory")
# How often idle models are looked for, in parts of the time after which they are unloaded, and at most, in seconds.
_LOOKS, _LONGEST_LOOK = 4, 30.0


class Library:
    """loaders: name -> what loads its engine, called in a thread; the first is the default model. most: models that are
    loaded at a time; idle: seconds after which an unused one is unloaded, None: never; patience: seconds that a request
    waits for a place."""

    def __init__(
        self,
        loaders: Mapping[str, Callable[[], Engine]],
        most: int = 1,
        idle: float | None = None,
        patience: float = 60.0,
    ) -> None:
        self._loaders, self._most, self._idle, self._patience = dict(loaders), most, idle, patience
        self.created = int(time.time())
        self._loaded: dict[str, LoadedModel] = {}
        self._loading: dict[str, asyncio.Task[LoadedModel]] = {}
        self._one_load = asyncio.Lock()
        self._changed = asyncio.Condition()
        self._sweeper: asyncio.Task[None] | None = None

    @property
    def names(self) -> list[str]:
        """Of all models, the default one first."""
        return list(self._loaders)

    @property
    def loaded(self) -> Mapping[str, LoadedModel]:
        """Those that are loaded now, by name."""
        return self._loaded

    def name(self, given: str) -> str:
        """The model that a client means: "" is the default one; ":latest", which ollama's clients add, has no meaning.
        ApiError 404 for others."""
        if not given:
            return self.names[0]
        short = given.removesuffix(":latest").lower()
        for name in self._loaders:
            if given == name or short == name.lower():
                return name
        raise ApiError(
            404, f"there is no model {given!r} here: choose from {', '.join(self._loaders)}", "model", "model_not_found"
        )

    def add(self, name: str, engine: Engine) -> LoadedModel:
        """A model that is loaded already."""
        model = self._loaded[name] = LoadedModel(name, engine)
        return model

    @asynccontextmanager
    async def use(self, given: str) -> AsyncIterator[LoadedModel]:
        """The model of that name. ApiError 404 for an unknown one, 503 if there is no room for it, 500 if it cannot be
        loaded."""
        model = await self.acquire(given)
        try:
            yield model
        finally:
            await self.release(model)

    async def acquire(self, given: str) -> LoadedModel:
        """`use` without a block: `release` follows."""
        name = self.name(given)
        while (model := self._loaded.get(name)) is None:
            task = self._loading.get(name)
            if task is None:
                task = self._loading[name] = asyncio.create_task(self._load(name))
                task.add_done_callback(lambda done: done.cancelled() or done.exception())  # it may have no waiter left
            # The load goes on if this request is cancelled: others may wait for it.
            await asyncio.shield(task)
        model.users += 1
        return model

    async def release(self, model: LoadedModel) -> None:
        model.users -= 1
        model.used = time.monotonic()
        async with self._changed:
            self._changed.notify_all()

    # ---- loading

    async def _load(self, name: str) -> LoadedModel:
        try:
            async with self._one_load:
                while len(self._loaded) >= self._most:
                    await self._unload_one()
                while True:
                    try:
                        engine = await asyncio.to_thread(self._loaders[name])
                        break
                    except (UserError, MemoryError) as error:
                        if self._unused() and _is_shortage(error):
                            await self._unload_one()
                            continue
                        raise ApiError(500, f"the model {name} cannot be loaded: {error}", "model") from error
                return self.add(name, engine)
        finally:
            del self._loading[name]

    def _unused(self) -> list[LoadedModel]:
        """The models that nobody uses, the one that was not used for the longest time first."""
        return sorted((m for m in self._loaded.values() if not m.users), key=lambda m: m.used)

    async def _unload_one(self) -> None:
        """Waits until a model is unused, and unloads it. ApiError 503 if that takes too long."""
        async with self._changed:
            try:
                async with asyncio.timeout(self._patience):
                    await self._changed.wait_for(self._unused)
            except TimeoutError:
                raise overloaded("all models that fit into the memory are in use: try again later") from None
        await self._unload(self._unused()[0])

    async def _unload(self, model: LoadedModel) -> None:
        del self._loaded[model.name]
        await asyncio.to_thread(model.close)
        display.message(f"unloaded {model.name}")

    # ---- idle models

    def start(self) -> None:
        """Begins to look for idle models, in the running event loop."""
        if self._idle is not None:
            self._sweeper = asyncio.create_task(self._unload_idle(self._idle))

    async def _unload_idle(self, idle: float) -> None:
        while True:
            await asyncio.sleep(min(idle / _LOOKS, _LONGEST_LOOK))
            async with self._one_load:
                for model in self._unused():
                    if time.monotonic() - model.used >= idle and not model.users:
                        await self._unload(model)

    async def close(self) -> None:
        """Unloads all models; answers in progress end."""
        tasks = [task for task in (self._sweeper, *self._loading.values()) if task]
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError, ApiError):
                await task
        for model in list(self._loaded.values()):
            del self._loaded[model.name]
            await asyncio.to_thread(model.close)


def _is_shortage(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or str(error).startswith(_SHORTAGES)
