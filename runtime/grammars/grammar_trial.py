"""Compiles a grammar in a child process first. A grammar that takes too much time or memory, or causes a crash, then
only ends this process. llguidance's own limits are not enough: some schemas take minutes, and a long chain of rules
overflows the stack."""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mlc_amd.runtime.errors import MachineError
from mlc_amd.runtime.limited_process import LimitedProcess, LimitExceeded

TOO_MUCH = "it takes too much time or memory: make it smaller"
SECONDS = 5.0  # limit of processor time for a grammar
_OPENING_SECONDS = 30.0  # the same for the vocabulary
_MEMORY = 2 << 30  # bytes


class ByteVocabulary:
    """A vocabulary for llguidance. tokens: their bytes. ends: those that end an answer. control: those without text."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], ends: Sequence[int], control: Sequence[int]) -> None:
        self.tokens, self.eos_token_id, self.special_token_ids = tokens, ends[0], control

    def __call__(self, text: bytes) -> list[int]:
        raise NotImplementedError("grammars are compiled with no_forcing: no text is tokenized")


def limits() -> Any:
    """The limits for a grammar's work, in both processes. One step computes one mask."""
    import llguidance

    return llguidance.LLParserLimits(
        initial_lexer_fuel=1_000_000,  # about 20 ms
        step_lexer_fuel=100_000,  # about 7 ms
        step_max_items=50_000,
        max_lexer_states=50_000,  # a state takes 1 to 2 kB
        max_grammar_size=200_000,
        verbose_errors=False,
    )


class GrammarTrial:
    """The child process. Thread-safe. control: the ids of control tokens by their texts."""

    def __init__(self, vocab: int, ends: Sequence[int], control: Mapping[str, int]) -> None:
        opening = {"vocab": vocab, "ends": list(ends), "control": dict(control)}
        self._process = LimitedProcess(__name__, opening, SECONDS, _MEMORY, _OPENING_SECONDS)

    def problem(self, grammar: str) -> str:
        """Why the grammar cannot be used; "" if it can. Raises MachineError if the child process cannot be started."""
        try:
            self._process.open()
        except LimitExceeded:
            raise MachineError(
                "grammars and schemas cannot be used: the process that tries them does not start; see what "
                f"`{sys.executable} -c 'import llguidance'` says"
            ) from None
        try:
            return self._process.request(grammar)
        except LimitExceeded:
            return TOO_MUCH

    def close(self) -> None:
        self._process.close()


def open_work(opening: dict[str, Any]) -> tuple[None, Callable[[str], str]]:
    """In the child process. Its vocabulary has the real one's control tokens; all other tokens are single bytes."""
    import llguidance

    tokens = [b""] * opening["vocab"]
    for text, token in opening["control"].items():
        tokens[token] = text.encode()
    free = iter([token for token in range(opening["vocab"]) if not tokens[token]])
    for byte, token in zip(range(256), free, strict=False):
        tokens[token] = bytes((byte,))
    vocabulary = ByteVocabulary(tokens, opening["ends"], list(opening["control"].values()))
    tokenizer: Any = llguidance.LLTokenizer(
        vocabulary,  # pyright: ignore[reportArgumentType]
        eos_token=opening["ends"],
    )

    def problem(grammar: str) -> str:
        matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits())
        matcher.compute_bitmask()
        return matcher.get_error()

    return None, problem
