"""`Engine`, the public class for a loaded model: loading, and conversations. It inherits generations from
text_engine.py, and logits and the KV cache from logits_engine.py."""

from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Unpack

from mlc_amd.runtime.artifact.artifact import Artifact
from mlc_amd.runtime.cache.kv_pool import KvSize
from mlc_amd.runtime.devices.opening import open_device
from mlc_amd.runtime.engine.admission import SchedulerLimits
from mlc_amd.runtime.engine.chat import Conversation, TurnOptions
from mlc_amd.runtime.engine.generation import ProgressCallback
from mlc_amd.runtime.engine.text_engine import TextEngine
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.options import RunOptions
from mlc_amd.runtime.sampling.settings import Sampling, SamplingChanges
from mlc_amd.runtime.speculation.draft_model import OWN, open_drafter
from mlc_amd.runtime.text.messages import check_question, content_of

_DEFAULTS = RunOptions()


class Engine(TextEngine):
    """A loaded model on a device. It is a context manager that closes it. Several threads may use it."""

    def __init__(self, artifact: Artifact, device, limits: SchedulerLimits | None = None):
        super().__init__(artifact, device, limits)
        self._conversation: Conversation | None = None

    @classmethod
    def load(cls, path: str | Path, options: RunOptions = _DEFAULTS, kv: KvSize | None = None) -> "Engine":
        """Loads an artifact. options.draft: "lookup", "mtp", or the artifact of a draft model. kv: the size of the KV
        cache, instead of that of the options. Raises UserError if the artifact cannot run on this machine."""
        if Path(path).suffix == ".gguf" and not Path(path).is_dir():
            raise UserError(f"{path} is not compiled yet: mlc_amd.load() and `mlc-amd compile` do that")
        disk = options.disk_bytes
        size = kv or KvSize.of(options.kv_tokens, options.kv_memory)
        artifact = Artifact.open(path, options.verify)
        chosen = options.device, options.threads, options.n_cpu_moe, size, options.devices, options.tensor_split
        engine = cls(artifact, open_device(artifact, *chosen))
        try:
            if disk is not None:
                engine.keep_on_disk(disk)
            if options.draft == OWN:
                engine.speculate(engine.own_draft())
            else:
                engine.speculate(open_drafter(options.draft, engine.tokenizer, options.device, options.threads, size))
        except BaseException:
            engine.close()
            raise
        return engine

    def reset(self) -> None:
        """Ends the conversation of `chat`, and empties the cache unless generations are using it."""
        self._conversation = None
        super().reset()

    def conversation(
        self,
        system: str | None = None,
        sampling: Sampling | None = None,
        on_full: Literal["error", "drop"] = "error",
        thinking: str = "auto",
        **changes: Unpack[SamplingChanges],
    ) -> Conversation:
        """A new conversation. Arguments: see `Conversation`; changes: single sampling parameters. An engine may have
        any number of conversations; those with a common beginning share it in the cache."""
        return Conversation(self, system, (sampling or self.sampling).changed(**changes), on_full, thinking)

    def chat(
        self,
        message: str | Sequence[Mapping[str, Any]],
        *,
        sampling: Sampling | None = None,
        max_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        thinking: str | None = None,
        progress: ProgressCallback | None = None,
        **changes: Unpack[SamplingChanges],
    ) -> Generator[str, None, None]:
        """Yields the answer's text in pieces, without the model's thinking.

        message: a string is the next turn of the engine's conversation. A list of messages (runtime/text/messages.py),
        of which the last must be the user's, begins a new conversation. Options apply to this turn alone: see
        `generate`, and `Conversation` for `thinking`. Raises UserError for invalid messages and options, at once.
        """
        if isinstance(message, str):
            conversation, content = self._conversation or Conversation(self), message
        else:
            *before, question = check_question(message)
            conversation, content = Conversation(self), content_of(question)
            conversation.messages = before
        answer = conversation.chat(
            content, max_tokens, stop, sampling=sampling, thinking=thinking, progress=progress, **changes
        )
        self._conversation = conversation
        return answer

    def ask(self, message: str | Sequence[Mapping[str, Any]], **options: Unpack[TurnOptions]) -> str:
        """The whole answer of `chat`, with the same options and errors. If `cancel` ends it, the part so far."""
        return "".join(self.chat(message, **options))
