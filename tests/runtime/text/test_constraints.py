"""What answers may consist of, and the log-probabilities of their tokens, beside answers without either."""

import asyncio

import numpy as np
import pytest

from mlc_amd.runtime.engine.sampled_rows import SampledRows
from mlc_amd.runtime.errors import MachineError, UserError
from mlc_amd.runtime.grammars.constraints import mask_of
from mlc_amd.runtime.sampling.device_rows import mask_words
from mlc_amd.runtime.sampling.layout import FIELDS

PROMPT = "import "


class Only:
    """Answers of tokens of a set; complete after `most` of them. `fails`: the step at which it raises."""

    def __init__(self, vocab, tokens, most=None, fails=None):
        self.vocab, self.tokens, self.most, self.fails = vocab, tokens, most, fails
        self.accepted = []

    def allowed(self):
        if self.fails == len(self.accepted):
            raise ZeroDivisionError("a broken grammar")
        return None if self.tokens == "any" else mask_words(np.isin(np.arange(self.vocab), list(self.tokens)))

    def accept(self, token):
        self.accepted.append(token)

    @property
    def complete(self):
        return self.most is not None and len(self.accepted) >= self.most


def ids(pieces):
    return [piece.id for piece in pieces]


@pytest.mark.parametrize("options", [{}, {"temperature": 2.0, "seed": 4}, {"repetition_penalty": 1.3}], ids=str)
def test_answers_consist_of_allowed_tokens(engine, options):
    made = []

    def constraint():
        made.append(Only(engine.vocab, range(300, 330), 9 if made else None))
        return made[-1]

    pieces = list(engine.generate(PROMPT, max_tokens=12, n=2, constraint=constraint, **options))
    stats = engine._last.answers
    for i, (wanted, finish) in enumerate(((12, "length"), (9, "stop"))):
        answer = ids(piece for piece in pieces if piece.index == i)
        assert len(answer) == wanted and set(answer) <= set(range(300, 330)) and answer == made[i].accepted
        assert (stats[i].generated, stats[i].finish) == (wanted, finish)


def test_a_device_looks_for_the_likeliest_of_more_tokens_only(engine):
    """Of as many as it may keep, it keeps all."""
    for allowed, top_k in ((40, 0), (41, 40)):
        constraint = Only(engine.vocab, range(300, 300 + allowed))
        made = ids(engine.generate(PROMPT, max_tokens=3, constraint=lambda: constraint, temperature=2.0, top_k=40))  # noqa: B023
        assert len(made) == 3 and set(made) <= set(constraint.tokens)
        assert engine.device.io["sampling"][0, FIELDS.index("top_k")] == top_k


def test_the_end_token_ends_where_it_is_allowed(engine):
    end = next(iter(engine.tokenizer.end_ids))
    made = []

    def constraint():
        made.append(Only(engine.vocab, {end}))
        return made[-1]

    assert list(engine.generate(PROMPT, constraint=constraint)) == [] and engine.last.finish == "stop"
    assert made[0].accepted == []


def test_failing_answers_fail_alone(engine):
    alone = ids(engine.generate(PROMPT, max_tokens=8))
    cases = (
        (lambda: Only(engine.vocab, ()), UserError, "allows no token", 0),
        (lambda: Only(engine.vocab, {5}, fails=2), ZeroDivisionError, "a broken grammar", 2),
        (lambda: Only(64, {5}), ValueError, r"a mask is int32 \[2\]: it must be int32 \[256\]", 0),
    )
    other = engine.generate(PROMPT, max_tokens=8)
    made = [next(other).id]
    for constraint, kind, message, pieces in cases:
        failing, got = engine.generate(PROMPT, constraint=constraint, max_tokens=8), []
        with pytest.raises(kind, match=message):
            got.extend(failing)
        assert len(ids(failing)) == 0 and engine.last.generated == pieces
        made.append(next(other).id)
    assert made + ids(other) == alone and engine.queue == (0, 0) and engine.kv_usage.used == 0

    def broken():
        raise UserError("no such grammar")

    with pytest.raises(UserError, match="no such grammar"):
        next(engine.generate(PROMPT, constraint=broken))


def test_errors_after_the_first_pieces_reach_asyncio(engine, monkeypatch):
    read, left = SampledRows.read, [0]

    def damaged(rows, wanted, choices):
        """The device reports a logit that is not a number, after some steps."""
        left[0] -= bool(choices)
        return [one._replace(token=-1) if left[0] == 0 else one for one in read(rows, wanted, choices)]

    async def error_of(fails: int | None, n: int, taken: int | None) -> tuple[BaseException | None, int]:
        made = iter([None] * (n - 1) + [fails])
        answers = engine.agenerate(
            PROMPT, max_tokens=40, min_tokens=40, n=n,
            constraint=lambda: Only(engine.vocab, "any", fails=next(made)) if fails is not None else None,
        )  # fmt: skip
        pieces = 0
        try:
            async with asyncio.timeout(60):
                async for _ in answers:
                    pieces += 1
                    if pieces == taken:
                        await asyncio.sleep(0.05)  # it fails meanwhile
                        return None, pieces
        except Exception as error:
            return error, pieces
        finally:
            await answers.aclose()

    for fails in (0, 1, 3):
        for n in (1, 3):
            error, pieces = asyncio.run(error_of(fails, n, None))
            assert isinstance(error, ZeroDivisionError) and pieces >= fails
            assert asyncio.run(error_of(fails, n, 1))[1] == (1 if fails or n > 1 else 0)
    ids(engine.generate(PROMPT, max_tokens=1))  # the last step of the answers that were ended is over
    monkeypatch.setattr(SampledRows, "read", damaged)
    left[0] = 4
    error, pieces = asyncio.run(error_of(None, 1, None))
    assert isinstance(error, MachineError) and "not a finite number" in str(error) and pieces == 3
    ids(engine.generate(PROMPT, max_tokens=1))  # as above
    assert engine.queue == (0, 0) and engine.kv_usage.used == 0


def test_constrained_and_other_answers_share_steps(engine):
    alone = ids(engine.generate(PROMPT, max_tokens=10))

    async def ask(constraint):
        return ids([piece async for piece in engine.agenerate(PROMPT, max_tokens=10, constraint=constraint)])

    async def all_of_them():
        sets = [range(i * 100, i * 100 + 40) for i in range(1, 6)]
        makers = [lambda tokens=tokens: Only(engine.vocab, tokens) for tokens in sets]
        return sets, await asyncio.gather(ask(None), *map(ask, makers), ask(lambda: Only(engine.vocab, "any")))

    sets, found = asyncio.run(all_of_them())
    assert found[0] == found[-1] == alone
    for tokens, answer in zip(sets, found[1:-1], strict=True):
        assert len(answer) == 10 and set(answer) <= set(tokens)


def test_bits_beyond_the_vocabulary_do_not_count():
    class Mask:
        def __init__(self, *words):
            self.words = np.array(words, np.int32)

        def allowed(self):
            return self.words

    assert mask_of(Mask(0, -1), 37).tolist() == [0, 31]
    assert mask_of(Mask(1, 31), 37).tolist() == [1, 31]
    assert mask_of(Mask(0, -1 << 5), 37).tolist() == [0, 0]


# ---- log-probabilities


def logarithms(logits):
    exact = logits.astype(np.float64) - logits.max()
    return exact - np.log(np.exp(exact).sum())


@pytest.mark.parametrize("options", [{}, {"temperature": 1.5, "top_k": 9, "seed": 2}], ids=str)
def test_logprobs_are_those_of_the_model(engine, options):
    prompt = engine.tokenizer.encode_prompt(PROMPT)
    pieces = list(engine.generate(prompt, max_tokens=6, logprobs=4, **options))
    assert ids(engine.generate(prompt, max_tokens=6, **options)) == ids(pieces)
    engine.reset()
    logits = engine.score(prompt + ids(pieces))
    for i, piece in enumerate(pieces):
        exact = logarithms(logits[len(prompt) - 1 + i])
        assert abs(piece.logprob - exact[piece.id]) < 1e-3
        best = np.argsort(-exact)[:4]
        assert [token for token, _ in piece.top] == best.tolist()
        assert np.abs([value for _, value in piece.top] - exact[best]).max() < 1e-3


def test_logprobs_of_some_answers_in_a_step(engine):
    none, chosen, some = (engine.generate(PROMPT, max_tokens=5, logprobs=k) for k in (None, 0, 20))
    made = [list(pieces) for pieces in zip(none, chosen, some, strict=True)]
    for a, b, c in made:
        assert a.id == b.id == c.id and a.text == b.text
        assert a.logprob is None and a.top == b.top == () and len(c.top) == 20
        assert b.logprob == c.logprob == pytest.approx(c.top[0][1], abs=1e-5) and c.top[0][0] == c.id
    for bad in (-1, 21, 1.5, "x"):
        with pytest.raises(UserError, match="must be a whole number from 0 to 20"):
            engine.generate(PROMPT, logprobs=bad)


def test_each_token_has_one_piece_with_its_text(engine):
    plain = list(engine.generate(PROMPT, max_tokens=20, logprobs=1))
    text = "".join(piece.text for piece in plain)
    assert len(plain) == engine.last.generated == 20
    for stop in (text[9:14], text[-3:], text[7:9] + "\0", text[-2:] + "\0"):
        found = list(engine.generate(PROMPT, max_tokens=20, logprobs=1, stop=[stop]))
        end = text.find(stop) if stop in text else len(text)
        assert "".join(piece.text for piece in found) == text[:end]
        assert len(found) == engine.last.generated
        for piece, same in zip(found, plain, strict=False):
            assert piece.id == same.id and piece.logprob == pytest.approx(same.logprob, abs=1e-6)
            assert same.text.startswith(piece.text)
            if end >= len(same.text):
                assert piece.text == same.text
            end = max(end - len(same.text), 0)


def test_a_character_of_several_tokens(engine):
    """Bytes are tokens of any byte-pair vocabulary."""
    tokens = engine.tokenizer.encode("\U00013000x", add_special=False)
    assert len(tokens) > 2
    script = iter(tokens)

    class Script:
        def allowed(self):
            bits = np.zeros(engine.vocab, bool)
            bits[next(script)] = True
            return mask_words(bits)

        def accept(self, token):
            pass

        complete = False

    pieces = list(engine.generate(PROMPT, max_tokens=len(tokens), constraint=Script, logprobs=0))
    assert ids(pieces) == tokens and "".join(piece.text for piece in pieces) == "\U00013000x"
    script = iter(tokens)
    pieces = list(engine.generate(PROMPT, max_tokens=2, constraint=Script, logprobs=0))
    assert ids(pieces) == tokens[:2] and [piece.text for piece in pieces] == ["", "\ufffd"]
    assert all(piece.logprob is not None for piece in pieces)
