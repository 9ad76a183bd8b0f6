"""A model that is loaded, with what its answers need besides the engine."""

import threading
import time
from collections.abc import Sequence

from mlc_amd.runtime.calls import tool_calls
from mlc_amd.runtime.engine.engine import Engine
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.grammars.grammars import Grammars
from mlc_amd.runtime.text import reasoning
from mlc_amd.runtime.text.chat_template import ChatTemplate
from mlc_amd.tools.server.chat_request import TokenLogprob
from mlc_amd.tools.server.prompts import Prompter

# The log probability of tokens that are next to impossible: JSON has no infinity. OpenAI's API has the same.
_LOWEST = -9999.0


class LoadedModel:
    """name: in the API. users: requests that use it now; used: when the last one ended (time.monotonic)."""

    def __init__(self, name: str, engine: Engine) -> None:
        self.name, self.engine = name, engine
        self.users, self.used = 0, time.monotonic()
        self.reasoning = reasoning.detect(engine.tokenizer.has_token)
        self.tool_template = _tool_template(engine)
        self.calls = tool_calls.detect(engine.tokenizer.has_token, self.tool_template.source)
        self.prompter = Prompter(engine.tokenizer, engine.chat_template, self.tool_template, self.calls.instructed)
        for template in (engine.chat_template, self.tool_template):
            template.start()
        self._lock = threading.Lock()
        self._grammars: Grammars | None = None

    @property
    def grammars(self) -> Grammars:
        """Made when it is first needed, by whichever thread that is. UserError if this model cannot have grammars."""
        with self._lock:
            if self._grammars is None:
                self._grammars = Grammars(self.engine.tokenizer, self.engine.vocab, self.reasoning)
            return self._grammars

    def close(self) -> None:
        """Unloads it."""
        if self._grammars is not None:
            self._grammars.close()
        self.tool_template.close()
        self.engine.close()

    def token_logprob(self, token: int, logprob: float, top: Sequence[tuple[int, float]] = ()) -> TokenLogprob:
        """A token with its alternatives, as answers have them. Control tokens have their texts, too."""
        piece = self.engine.tokenizer.token_bytes(token)
        others = tuple(self.token_logprob(*one) for one in top)
        return TokenLogprob(token, piece.decode("utf-8", "replace"), piece, max(logprob, _LOWEST), others)


def _tool_template(engine: Engine) -> ChatTemplate:
    """The chat template for requests with tools: some models have one of its own for them."""
    try:
        return ChatTemplate.load(engine.artifact.path, "tool_use")
    except UserError:  # it has none
        return engine.chat_template
