"""What masks of grammars cost: decoding by several sequences whose answers match a schema, beside decoding without.

    python -m tests.dev.mask_cost [MODEL] [-np 8] [-n 128] [--target auto]
    python -m tests.dev.mask_cost --synthetic llama3-8b:q4_0 [--vocabulary GGUF] [-o ARTIFACT] ..

For each kind of schema: tokens per second, the share of the time that masks and what goes with them take (a GPU hides
some of it), and how long the masks of a step take by themselves.
Rounds of all kinds follow one another, and medians count. The masks are those of the answers that were written: a
model with random weights writes noise that matches. They depend on the vocabulary, which synthetic models invent unless
they get that of a GGUF file. -o only compiles, without weights, for a bundle. --schemas FILE: one more row, of all the
schemas in a JSON array. --guesses: also with guesses that take no time, all right, and all wrong though the grammar
allows them.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mlc_amd.runtime.engine.engine import Engine
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.grammars.grammars import Grammar, Grammars
from mlc_amd.runtime.options import CompileOptions, LoadOptions, RunOptions
from mlc_amd.tools import target as targets
from mlc_amd.tools.hub import models
from mlc_amd.tools.terminal import display

_MANY = 1 << 12  # values, so that no answer ends early
_SETTLING = 40  # rounds at most
_RECORD = {
    "name": {"type": "string", "maxLength": 12},
    "age": {"type": "integer", "minimum": 0, "maximum": 150},
    "price": {"type": "number"},
    "colour": {"enum": ["red", "green", "blue"]},
    "sold": {"type": "boolean"},
}
KINDS: dict[str, dict] = {
    "strings": {"type": "string", "maxLength": 24},
    "numbers": {"type": "number"},
    "records": {"type": "object", "properties": _RECORD, "required": list(_RECORD)},
}


Answers = list[list[int]]  # their tokens


class Run(NamedTuple):
    """Answers to all prompts together."""

    seconds: float  # per token after their first ones
    answers: Answers
    right: float  # share of guesses


def rate(engine: Engine, prompts: Answers, tokens: int, grammar: Grammar | None, temperature: float = 1.0) -> Run:
    pieces = engine.generate(
        prompts, max_tokens=tokens, min_tokens=tokens, constraint=grammar, temperature=temperature, top_k=40, seed=1
    )
    made: Answers = [[] for _ in prompts]
    for piece in pieces:
        made[piece.index].append(piece.id)
    stats = pieces.answers
    seconds = max(one.decode_s for one in stats) / sum(one.generated - 1 for one in stats)
    return Run(seconds, made, sum(one.accepted for one in stats) / max(1, sum(one.guessed for one in stats)))


def replayed(grammar: Grammar, made: Answers) -> float:
    """Seconds for the masks of a step, on average, in which these answers are written."""
    constraints, seconds = [grammar() for _ in made], 0.0
    steps = list(zip(*made, strict=False))
    for tokens in steps:
        begun = time.perf_counter()
        for constraint in constraints:
            constraint.allowed()
        seconds += time.perf_counter() - begun
        for constraint, token in zip(constraints, tokens, strict=True):
            constraint.accept(token)
    return seconds / len(steps)


def endless(schema: dict) -> dict:
    """Of an array of so many that no answer ends early. References of the schema are to its $defs."""
    items = {key: value for key, value in schema.items() if key != "$defs"}
    return {"type": "array", "items": items, "minItems": _MANY, "$defs": schema.get("$defs", {})}


class Known:
    """A source of guesses: the answers to prompts."""

    expected, free, follows, at_once = 0.7, True, False, False

    def __init__(self, prompts: Answers, answers: Answers):
        self._texts = {tuple(prompt): [*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)}

    def draft(self, wanted):
        """As of Drafter."""
        return {request: self._next(choice.tokens, count) for request, (choice, count) in wanted.items()}

    def _next(self, tokens: Sequence[int], count: int) -> list[int]:
        text = next(text for prompt, text in self._texts.items() if tuple(tokens[: len(prompt)]) == prompt)
        return text[len(tokens) :][:count]

    def forget(self, request):
        """Nothing is kept of it."""

    def close(self):
        """There is nothing to release."""


def others(grammar: Grammar | None, answers: Answers, vocab: int) -> Answers:
    """For each token of the answers another one that may stand there; the same where there is none."""
    random, found = np.random.default_rng(0), []
    for answer in answers:
        constraint, mine = grammar() if grammar else None, []
        for token in answer:
            mask = None if constraint is None else constraint.allowed()
            bits = np.ones(vocab, np.uint8) if mask is None else np.unpackbits(mask.view(np.uint8), bitorder="little")
            allowed = np.flatnonzero(bits)
            allowed = allowed[allowed != token]
            mine.append(int(random.choice(allowed)) if len(allowed) else token)
            if constraint is not None:
                constraint.accept(token)
        found.append(mine)
    return found


def settled(engine: Engine, prompts: Answers, tokens: int, grammar: Grammar | None) -> Answers:
    """The answers with these answers as guesses. Kernels of more rows round differently, and what a model with random
    weights says depends on that; another guess changes nothing before it, so that a few rounds settle it."""
    answers = rate(engine, prompts, tokens, grammar, temperature=0).answers
    for _ in range(_SETTLING):
        engine.speculate(Known(prompts, answers))
        made = rate(engine, prompts, tokens, grammar, temperature=0).answers
        if made == answers:
            break
        answers = made
    return answers


def report_guesses(engine: Engine, sequences: int, tokens: int, rounds: int) -> None:
    """Prints what guesses gain that take no time, under schemas and without."""
    grammars = Grammars(engine.tokenizer, engine.vocab)
    prompts = [engine.tokenizer.encode_prompt(f"{number}. Write:") for number in range(sequences)]
    print(f"\n{engine.device.name}, {sequences} sequences, {tokens} tokens each\n")
    print("| schema | t/s | guesses right | of them | guesses wrong | of them right |\n|" + " --- |" * 6)
    for kind in ("none", *KINDS):
        grammar = grammars.json_schema(endless(KINDS[kind])) if kind in KINDS else None
        answers = settled(engine, prompts, tokens, grammar)
        sources = (None, Known(prompts, answers), Known(prompts, others(grammar, answers, engine.vocab)))
        found: list[list[tuple[float, float]]] = [[] for _ in sources]
        for mine, source in zip(found, sources, strict=True):
            engine.speculate(source)  # it learns what guesses are worth, from all rounds
            for number in range(rounds + 2):
                run = rate(engine, prompts, tokens, grammar, temperature=0)
                mine += [(run.seconds, run.right)] if number > 1 else []
        engine.speculate(None)
        (plain, _), *guessed = [map(statistics.median, zip(*mine, strict=True)) for mine in found]
        cells = [f"{1 / each:.0f} ({plain / each:.2f}x) | {share:.0%}" for each, share in guessed]
        print(f"| {kind} | {1 / plain:.0f} | {' | '.join(cells)} |")
    grammars.close()


def report(engine: Engine, sequences: int, tokens: int, rounds: int, schemas: Sequence[dict] = ()) -> None:
    """Prints the table; `schemas` make one row together."""
    grammars = Grammars(engine.tokenizer, engine.vocab)
    prompts = [engine.tokenizer.encode_prompt(f"{number}. Write:") for number in range(sequences)]
    kinds: dict[str, list] = {"none": [None]}
    kinds |= {kind: [grammars.json_schema(endless(schema))] for kind, schema in KINDS.items()}
    kinds |= {f"{len(schemas)} schemas": [grammars.json_schema(endless(one)) for one in schemas]} if schemas else {}
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    made: dict[str, list[Answers]] = {}
    for number in range(rounds + 1):  # the first one warms up
        for kind, those in kinds.items():
            found = [rate(engine, prompts, tokens, grammar) for grammar in those]
            made[kind] = [run.answers for run in found]
            seconds[kind] += [statistics.mean(run.seconds for run in found)] if number else []
    grammars.close()
    plain = statistics.median(seconds["none"])
    print(f"{engine.device.name}, vocabulary {engine.vocab}, {sequences} sequences, {tokens} tokens each\n")
    print("| schema | t/s | slower by | us of masks a step |\n| --- | --- | --- | --- |")
    for kind, those in kinds.items():
        each = statistics.median(seconds[kind])
        cells = [kind, f"{1 / each:.0f}"]
        if kind != "none":
            cells.append(f"{1 - plain / each:.1%}")
            spent = [replayed(one, answers) for one, answers in zip(those, made[kind], strict=True)]
            cells.append(f"{1e6 * statistics.mean(spent):.0f}")
        print(f"| {' | '.join(cells + [''] * (4 - len(cells)))} |")


def compile_with_vocabulary(options: argparse.Namespace, context: int, out: Path, weights: bool) -> None:
    """Compiles the synthetic model, with the tokenizer of a GGUF file if the options name one."""
    models.check_compiler(options.synthetic)
    from mlc_amd.compiler.gguf.reader import read_metadata
    from mlc_amd.compiler.gguf.synthetic import synthetic
    from mlc_amd.compiler.pipeline import compile_model

    keys = read_metadata(options.vocabulary) if options.vocabulary else {}
    tokenizer = {key: value for key, value in keys.items() if key.startswith("tokenizer.")}
    with display.compile_progress(f"compiling {options.synthetic}") as progress:
        model = synthetic(options.synthetic, keys=tokenizer)
        target, arch = targets.resolve(options.target, options.arch)
        compile_model(
            model, out, CompileOptions(target=target, arch=arch, ctx=context), weights=weights, progress=progress
        )


@contextmanager
def opened(options: argparse.Namespace, context: int | None, kv_tokens: int) -> Iterator[Engine]:
    """The engine of the model that the options name."""
    if options.vocabulary is None:
        made = LoadOptions(
            model=options.model, target=options.target, arch=options.arch, ctx=context, kv_tokens=kv_tokens
        )
        with models.load_engine(made, options.synthetic) as engine:
            yield engine
        return
    with tempfile.TemporaryDirectory() as folder:
        compile_with_vocabulary(options, context or 512, Path(folder) / "model", weights=True)
        with Engine.load(Path(folder) / "model", RunOptions(kv_tokens=kv_tokens)) as engine:
            yield engine


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", nargs="?", help="artifact, GGUF file or name; the bundled model if omitted")
    parser.add_argument("--synthetic", help="instead: PRESET:FORMAT, such as llama3-8b:q4_0")
    parser.add_argument("--vocabulary", help="a GGUF file whose tokenizer the synthetic model gets")
    parser.add_argument("-o", "--output", help="compile the synthetic model into this folder, and measure nothing")
    parser.add_argument("--schemas", help="a JSON file of an array of schemas")
    parser.add_argument("--guesses", action="store_true", help="also what guesses gain that take no time")
    parser.add_argument("--target", default="auto")
    parser.add_argument("--arch", default="native")
    parser.add_argument("-np", "--sequences", type=int, default=8)
    parser.add_argument("-n", "--tokens", type=int, default=128)
    parser.add_argument("-r", "--rounds", type=int, default=3)
    options = parser.parse_args()
    try:
        if min(options.sequences, options.tokens - 1, options.rounds) < 1:
            raise UserError("there must be at least one sequence, two tokens and one round")
        if (options.vocabulary or options.output) and not options.synthetic:
            raise UserError("--vocabulary and -o are for --synthetic PRESET:FORMAT")
        room = options.tokens + 64  # the prompts are short
        source = models.source_path(options.model, options.synthetic)
        context = None if source and models.is_artifact(source) else -(-max(room, 512) // 256) * 256
        if options.output:
            compile_with_vocabulary(options, context or 512, Path(options.output), weights=False)
            return 0
        with opened(options, context, options.sequences * (room + 64)) as engine:
            schemas = json.loads(Path(options.schemas).read_text()) if options.schemas else ()
            report(engine, options.sequences, options.tokens, options.rounds, schemas)
            if options.guesses:
                report_guesses(engine, options.sequences, options.tokens, options.rounds)
    except UserError as error:
        display.message(f"error: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
