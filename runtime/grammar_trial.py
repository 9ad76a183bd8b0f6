"""Compiles grammars in another process first: one that takes too long, too much memory or a crash ends that process.

llguidance limits the work of most grammars, but not of all: some schemas take minutes, and a long chain of rules
overflows the stack.

In:  grammars, as llguidance takes them. Out: UserError for those that must not be compiled here.

Run as a program it is that process: the first line of stdin describes the vocabulary ({"vocab", "ends", "control"}),
each further one is a grammar (a JSON string); the answer to each is a line: a JSON string, what is wrong, or "".
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import IO, Any

TOO_MUCH = "it takes too much time or memory: make it smaller"
SECONDS = 5.0  # for one grammar
_START_SECONDS = 30.0  # for the process, on a busy machine
_MEMORY = 2 << 30  # bytes of address space


class Vocabulary:
    """A vocabulary as llguidance's tokenizer takes it. tokens: their bytes; ends: tokens that end an answer; control:
    tokens without a text."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], ends: Sequence[int], control: Sequence[int]) -> None:
        self.tokens, self.eos_token_id, self.special_token_ids = tokens, ends[0], control

    def __call__(self, text: bytes) -> list[int]:
        raise NotImplementedError("grammars are compiled with no_forcing: no text is tokenized")


def limits() -> Any:
    """How much work a grammar may make, here and there. A step computes one mask."""
    import llguidance

    return llguidance.LLParserLimits(
        initial_lexer_fuel=1_000_000,  # about 20 ms
        step_lexer_fuel=100_000,  # about 7 ms
        step_max_items=50_000,
        max_lexer_states=50_000,  # of 1 to 2 kB
        max_grammar_size=200_000,
        verbose_errors=False,
    )


class Trial:
    """The other process, which is started when it is needed and when it has ended. Thread-safe.

    control: ids of control tokens by their text.
    """

    def __init__(self, vocab: int, ends: Sequence[int], control: Mapping[str, int]) -> None:
        self._description = json.dumps({"vocab": vocab, "ends": list(ends), "control": dict(control)})
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def problem(self, grammar: str) -> str:
        """Why the grammar cannot be used; "" if it can."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._start()
            answer = self._ask(grammar, SECONDS)
            if answer is None:
                self._end()
                return TOO_MUCH
            return answer

    def close(self) -> None:
        with self._lock:
            self._end()

    def _start(self) -> None:
        self._end()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        if self._ask(json.loads(self._description), _START_SECONDS) != "":
            self._end()
            raise RuntimeError("the process that tries grammars does not start")

    def _ask(self, request: object, seconds: float) -> str | None:
        """The answer; None if there is none in time."""
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: then there is no answer
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
        ready, _, _ = select.select([process.stdout], [], [], seconds)
        line = process.stdout.readline() if ready else b""
        return json.loads(line) if line else None

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for stream in (self._process.stdin, self._process.stdout):
                if stream is not None:
                    with contextlib.suppress(BrokenPipeError):
                        stream.close()
            self._process = None


def _serve(requests: IO[str], answers: IO[str]) -> None:
    """The program. Its vocabulary has the control tokens of the real one, and single bytes for all others."""
    import resource

    import llguidance

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that has started this one
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    given = json.loads(requests.readline())
    tokens = [b""] * given["vocab"]
    for text, token in given["control"].items():
        tokens[token] = text.encode()
    free = iter([token for token in range(given["vocab"]) if not tokens[token]])
    for byte, token in zip(range(256), free, strict=False):
        tokens[token] = bytes((byte,))
    vocabulary = Vocabulary(tokens, given["ends"], list(given["control"].values()))
    tokenizer: Any = llguidance.LLTokenizer(vocabulary, eos_token=given["ends"])  # pyright: ignore[reportArgumentType]
    print(json.dumps(""), file=answers, flush=True)
    for line in requests:
        matcher = llguidance.LLMatcher(tokenizer, json.loads(line), log_level=0, limits=limits())
        matcher.compute_bitmask()
        print(json.dumps(matcher.get_error()), file=answers, flush=True)


if __name__ == "__main__":
    _serve(sys.stdin, sys.stdout)
