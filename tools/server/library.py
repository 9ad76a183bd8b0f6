"""The models of a server. A model is loaded when a request needs it, and unloaded when nobody uses it.

In: names, and a function for each that loads the model. Out: `Library.use(name)`, a loaded model that stays loaded
during the `async with` block.

If there would be more than `most` models, or the memory is too small for another one, the models that were unused for
the longest time are unloaded first; a model with answers in progress never is. Loading and closing run in threads. One
model is loaded at a time; requests for other models continue meanwhile.
"""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Hashable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TypeVar

from mlc_amd.runtime.calls import tool_calls
from mlc_amd.runtime.engine.encoder import Encoder
from mlc_amd.runtime.engine.engine import Engine
from mlc_amd.runtime.errors import UserError, shorten
from mlc_amd.runtime.grammars.grammars import Grammars
from mlc_amd.runtime.images.rows import Prompt
from mlc_amd.runtime.text import reasoning
from mlc_amd.runtime.text.chat_template import ChatTemplate
from mlc_amd.tools.server.chat_request import TokenLogprob
from mlc_amd.tools.server.errors import ApiError, overloaded
from mlc_amd.tools.server.prompts import Prompter
from mlc_amd.tools.terminal import display

# How errors about too little memory begin (runtime/artifact/memory.py).
_SHORTAGES = ("out of GPU memory", "out of host memory")
# Parts of the idle time after which idle models are looked for; the longest time between two looks, in seconds.
_LOOKS, _LONGEST_LOOK = 4, 30.0
# The log probability that is reported for extremely unlikely tokens, as JSON has no infinity. OpenAI's API has the
# same.
_LOWEST = -9999.0
Kind = TypeVar("Kind", bound="Loaded")


class Loaded:
    """name: in the API. users: number of requests that use it now. used: when the last request ended
    (time.monotonic)."""

    cannot = ""  # the error of requests for the other kind of model

    def __init__(self, name: str, engine: Engine | Encoder) -> None:
        self.name, self.engine = name, engine
        self.users, self.used = 0, time.monotonic()

    @property
    def sees(self) -> bool:
        """Whether it accepts images."""
        return "vision" in self.engine.artifact.manifest

    def close(self) -> None:
        """Unloads the model."""
        self.engine.close()


class LoadedEncoder(Loaded):
    """A model that computes vectors or scores."""

    engine: Encoder
    cannot = "is an embedding model: it generates no text"


class LoadedModel(Loaded):
    """A model that generates text. urls: whether it may download images from the web. slots: for each number
    (`AnswerRequest.slot`), the tokens of its last request and answer."""

    engine: Engine
    cannot = "generates text: it makes no embeddings and ranks no texts"

    def __init__(self, name: str, engine: Engine, urls: bool = False) -> None:
        super().__init__(name, engine)
        self.urls = urls
        self.reasoning = reasoning.detect(engine.tokenizer.has_token)
        try:  # some models have a separate chat template for requests with tools
            self.tool_template = ChatTemplate.load(engine.artifact.path, "tool_use")
        except UserError:
            self.tool_template = engine.chat_template
        self.calls = tool_calls.detect(engine.tokenizer.has_token, self.tool_template.source)
        self.prompter = Prompter(
            engine.tokenizer, engine.chat_template, self.tool_template, self.calls.instructed, self.reasoning,
            engine.images, urls,
        )  # fmt: skip
        for template in (engine.chat_template, self.tool_template):
            template.start()
        self.slots: dict[int, Prompt] = {}
        self._lock = threading.Lock()
        self._grammars: Grammars | None = None

    @property
    def grammars(self) -> Grammars:
        """The model's grammars. They are made on first use, in the caller's thread. Raises UserError if the model
        cannot have any."""
        with self._lock:
            if self._grammars is None:
                self._grammars = Grammars(self.engine.tokenizer, self.engine.vocab, self.reasoning)
            return self._grammars

    def close(self) -> None:
        """Unloads the model."""
        if self._grammars is not None:
            self._grammars.close()
        self.tool_template.close()
        super().close()

    def token_logprob(
        self, token: int, logprob: float | None, top: Sequence[tuple[int, float]] = (), rank: int = 0
    ) -> TokenLogprob:
        """A token with its alternatives, in the form for answers. Control tokens have their texts, too."""
        piece = self.engine.tokenizer.token_bytes(token)
        others = tuple(self.token_logprob(*one) for one in top)
        known = None if logprob is None else max(logprob, _LOWEST)
        return TokenLogprob(token, piece.decode("utf-8", "replace"), piece, known, others, rank)

    async def prompt_logprobs(self, ids: list[int], most: int, client: Hashable) -> tuple[TokenLogprob, ...]:
        """For each token of a prompt its log probability and the `most` most likely tokens in its place. The first
        token has none."""
        scores = await self.engine.ascore(ids, most, client)
        found = [self.token_logprob(ids[0], None)]
        found += [self.token_logprob(i, one.logprob, one.top, one.rank) for i, one in zip(ids[1:], scores, strict=True)]
        return tuple(found)


class Library:
    """loaders: name -> function that loads the engine, called in a thread; the first name is the default model. most:
    limit of loaded models. idle: seconds after which an unused model is unloaded, None: never. patience: seconds that a
    request waits until a model can be unloaded. image_urls: whether images may be downloaded. names: of all models, the
    default one first. loaded: loaded models by name. created: seconds since the epoch."""

    def __init__(
        self,
        loaders: Mapping[str, Callable[[], Engine | Encoder]],
        most: int = 1,
        idle: float | None = None,
        patience: float = 60.0,
        image_urls: bool = False,
    ) -> None:
        self._image_urls = image_urls
        self._loaders, self._most, self._idle, self._patience = dict(loaders), most, idle, patience
        self.names, self.created = list(loaders), int(time.time())
        self.loaded: dict[str, Loaded] = {}
        self._loading: dict[str, asyncio.Task[Loaded]] = {}
        self._one_load = asyncio.Lock()
        self._changed = asyncio.Condition()
        self._sweeper: asyncio.Task[None] | None = None

    def name(self, given: str) -> str:
        """The name of the model that a client means. "" is the default model; the suffix ":latest", which ollama's
        clients add, is ignored. Raises ApiError 404 for an unknown name."""
        if not given:
            return self.names[0]
        short = given.removesuffix(":latest").lower()
        for name in self.names:
            if given == name or short == name.lower():
                return name
        what = f"there is no model {shorten(given)} here: choose from {', '.join(self.names)}"
        raise ApiError(404, what, "model", "model_not_found")

    def add(self, name: str, engine: Engine | Encoder) -> Loaded:
        """Adds a model that is loaded already."""
        is_encoder = isinstance(engine, Encoder)
        model = LoadedEncoder(name, engine) if is_encoder else LoadedModel(name, engine, self._image_urls)
        self.loaded[name] = model
        return model

    @asynccontextmanager
    async def use(self, given: str, kind: type[Kind] = LoadedModel) -> AsyncIterator[Kind]:
        """The model with this name. Raises ApiError 404 if it is unknown, 400 if it is of another kind, 503 if there is
        no room for it, 500 if it cannot be loaded."""
        model = await self.acquire(given, kind)
        try:
            yield model
        finally:
            await self.release(model)

    async def acquire(self, given: str, kind: type[Kind] = LoadedModel) -> Kind:
        """`use` without a block. The caller must call `release`."""
        name = self.name(given)
        while (model := self.loaded.get(name)) is None:
            task = self._loading.get(name)
            if task is None:
                task = self._loading[name] = asyncio.create_task(self._load(name))
                # perhaps no request waits for it any more
                task.add_done_callback(lambda done: done.cancelled() or done.exception())
            # If this request is cancelled, loading continues, because others may wait for the model.
            await asyncio.shield(task)
        if not isinstance(model, kind):
            raise ApiError(400, f"the model {name} {model.cannot}", "model")
        model.users += 1
        return model

    async def release(self, model: Loaded) -> None:
        model.users -= 1
        model.used = time.monotonic()
        async with self._changed:
            self._changed.notify_all()

    # ---- loading

    async def _load(self, name: str) -> Loaded:
        try:
            async with self._one_load:
                while len(self.loaded) >= self._most:
                    await self._unload_one()
                while True:
                    try:
                        engine = await asyncio.to_thread(self._loaders[name])
                        break
                    except (UserError, MemoryError) as error:
                        is_shortage = isinstance(error, MemoryError) or str(error).startswith(_SHORTAGES)
                        if is_shortage and self._unused():
                            await self._unload_one()
                            continue
                        raise ApiError(500, f"the model {name} cannot be loaded: {error}", "model") from error
                return self.add(name, engine)
        finally:
            del self._loading[name]

    def _unused(self) -> list[Loaded]:
        """The models that nobody uses; the one that was unused for the longest time first."""
        return sorted((m for m in self.loaded.values() if not m.users), key=lambda m: m.used)

    async def _unload_one(self) -> None:
        """Waits until a model is unused, and unloads it. Raises ApiError 503 if this takes too long."""
        async with self._changed:
            try:
                async with asyncio.timeout(self._patience):
                    await self._changed.wait_for(self._unused)
            except TimeoutError:
                raise overloaded("all models that fit into the memory are in use: try again later") from None
        await self._unload(self._unused()[0])

    async def _unload(self, model: Loaded) -> None:
        del self.loaded[model.name]
        await asyncio.to_thread(model.close)
        display.message(f"unloaded {model.name}")

    # ---- idle models

    def start(self) -> None:
        """Starts to check for idle models, in the running event loop."""
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
        """Unloads all models. Ends answers in progress."""
        tasks = [task for task in (self._sweeper, *self._loading.values()) if task]
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError, ApiError):
                await task
        for model in list(self.loaded.values()):
            del self.loaded[model.name]
            await asyncio.to_thread(model.close)
