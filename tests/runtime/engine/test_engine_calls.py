"""The engine from Python: what its options mean and refuse, who may use it when, how it ends."""

import asyncio
import threading

import pytest

from mlc_amd.runtime.engine import sampled_rows
from mlc_amd.runtime.engine.engine import Engine
from mlc_amd.runtime.engine.generation import ContextFull
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.options import RunOptions
from mlc_amd.runtime.sampling.device_rows import write_row
from mlc_amd.runtime.sampling.settings import Sampling

QUESTION = "What does os.path.join do?"
PROMPT = f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
IDS = list(range(1000, 1600))  # two chunks


def text_of(pieces) -> str:
    return "".join(piece if isinstance(piece, str) else piece.text for piece in pieces)


# ---- options


def test_a_prompt_is_a_text_or_ids(engine):
    by_ids = list(engine.generate(engine.tokenizer.encode_prompt(PROMPT), max_tokens=12))
    assert list(engine.generate(PROMPT, max_tokens=12)) == by_ids


def test_settings_are_written_anew_only_where_recent_tokens_matter(engine, monkeypatch):
    written = []

    def counted(*arguments) -> None:
        written.append(arguments)
        write_row(*arguments)

    monkeypatch.setattr(sampled_rows, "write_row", counted)
    ids = [piece.id for piece in engine.generate(PROMPT, max_tokens=12)]
    other = [piece.id for piece in engine.generate(PROMPT, max_tokens=12, logit_bias={ids[3]: -100.0, 5: -1.0})]
    assert other[:3] == ids[:3] and ids[3] not in other and len(written) == 1
    list(engine.generate(PROMPT, max_tokens=12, repetition_penalty=1.1, seed=1))
    assert len(written) == 13


def test_a_stop_text_is_taken_whole(engine):
    whole = text_of(engine.generate(PROMPT, max_tokens=24))
    assert text_of(engine.generate(PROMPT, max_tokens=24, stop="pathname")) == whole[: whole.index("pathname")]
    assert text_of(engine.chat(QUESTION, max_tokens=24, stop="pathname")) == whole[: whole.index("pathname")]


def test_sampling_parameters_are_those_of_one_call(engine):
    greedy = text_of(engine.chat(QUESTION, max_tokens=12))
    hot = []
    for _ in range(2):
        engine.reset()
        hot.append(text_of(engine.chat(QUESTION, max_tokens=12, temperature=3.0, seed=7)))
    assert hot[0] == hot[1] != greedy
    assert hot[0] == text_of(engine.generate(PROMPT, Sampling(temperature=3.0), 12, seed=7))
    assert text_of(engine.chat([{"role": "user", "content": QUESTION}], max_tokens=12)) == greedy
    engine.reset()
    text_of(engine.chat(QUESTION, max_tokens=4, sampling=Sampling(temperature=3.0, seed=7)))
    first = text_of(engine.chat(QUESTION, max_tokens=12))
    history = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": text_of(
        engine.chat([{"role": "user", "content": QUESTION}], max_tokens=4, temperature=3.0, seed=7)
    )}]  # fmt: skip
    assert first == text_of(engine.chat([*history, {"role": "user", "content": QUESTION}], max_tokens=12))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_min_tokens_keeps_an_answer_from_ending(engine, temperature):
    settings = {"max_tokens": 300, "temperature": temperature, "seed": 1}
    free = engine.generate(PROMPT, **settings)
    text = text_of(free)
    made = free.stats.generated
    assert free.stats.finish == "stop" and made < 250
    longer = engine.generate(PROMPT, min_tokens=made + 20, **settings)
    assert text_of(longer).startswith(text) and longer.stats.generated >= made + 20
    assert text_of(engine.generate(PROMPT, min_tokens=made, **settings)) == text
    with pytest.raises(UserError, match="min_tokens is -1"):
        engine.generate(PROMPT, min_tokens=-1)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"max_tokens": -1}, "max_tokens is -1"),
        ({"top_k": 5.5}, "top_k is 5.5"),
        ({"stop": [""]}, "a stop text is empty"),
        ({"warmth": 1}, "no sampling parameter warmth"),
    ],
)
def test_bad_options_are_refused_before_anything_runs(engine, options, error):
    for call, argument in ((engine.generate, PROMPT), (engine.chat, QUESTION), (engine.conversation().ask, QUESTION)):
        with pytest.raises(UserError, match=error):
            call(argument, **options)
    assert engine.position == 0


@pytest.mark.parametrize("ids", [[1.5], [], [[1]], [8192], "x"])
def test_bad_ids_are_refused(engine, ids):
    with pytest.raises(UserError):
        engine.prefill(ids)
    assert engine.position == 0


def test_a_bias_of_a_token_that_there_is_not_is_refused_before_others_share_a_step_with_it(engine):
    with pytest.raises(UserError, match="logit_bias has the token 90000: the vocabulary has"):
        engine.generate(PROMPT, logit_bias={3: 1.0, 90000: 1.0})


def test_messages_of_the_api_name_no_flags(engine):
    with pytest.raises(ContextFull, match=r"2100 tokens do not fit the context of 2048: [^-]*$"):
        engine.generate([1] * 2100)
    conversation = engine.conversation()
    text_of(conversation.chat(QUESTION, max_tokens=2))
    for text, rest in (("word " * 2040, 'on_full="drop"'), ("word " * 2100, "shorten it")):
        with pytest.raises(ContextFull) as caught:
            text_of(conversation.chat(text))
        assert "--" not in str(caught.value)
        assert rest in str(caught.value) or caught.value.turns
        assert str(caught.value).startswith(caught.value.what)
        conversation.reset()


# ---- whole texts


def test_whole_texts_are_those_of_the_pieces(engine):
    options = {"max_tokens": 12, "stop": "pathname", "temperature": 0.7, "seed": 3}
    expected = text_of(engine.generate(PROMPT, **options))
    messages = [{"role": "user", "content": QUESTION}]
    found = [engine.complete(prompt, **options) for prompt in (PROMPT, engine.tokenizer.encode_prompt(PROMPT))]
    found += [asyncio.run(engine.acomplete(PROMPT, **options)), engine.conversation().ask(QUESTION, **options)]
    found += [engine.ask(QUESTION, **options), engine.ask(messages, **options)]
    assert found == [expected] * 6 and expected
    assert engine.ask("And os.path.split?", max_tokens=2) and engine.last.cached_tokens > 20  # the same conversation


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        (["a", "b"], {}, "`generate` answers several prompts"),
        ([[1, 2]], {}, "`generate` answers several prompts"),
        ("a", {"n": 2}, "`generate` answers several prompts"),
        ([], {}, "no tokens"),
        ("a", {"heat": 1}, "no sampling parameter heat"),
        ("a", {"max_tokens": -1}, "max_tokens"),
    ],
)
def test_whole_texts_are_of_one_prompt(engine, prompt, options, message):
    with pytest.raises(UserError, match=message):
        engine.complete(prompt, **options)
    with pytest.raises(UserError, match=message):
        asyncio.run(engine.acomplete(prompt, **options))


def test_no_token_is_chosen_where_none_is_wanted(engine, monkeypatch):
    runner, chosen = engine._loop.runner, []
    sample = runner.sample
    monkeypatch.setattr(runner, "sample", lambda *args: chosen.append(sample(*args)) or chosen[-1])
    ids = engine.tokenizer.encode_prompt(PROMPT * 8)
    for prompts, options in ([ids], {"n": 2}), ([ids[:1], ids[1:]], {"min_tokens": 3}), ([ids], {"logprobs": 2}):
        engine.reset()
        assert text_of(engine.generate(prompts, max_tokens=0, **options)) == ""
        assert engine.last.generated == 0 and engine.last.finish == "length" and engine.last.ttft_s > 0
    assert chosen and not any(chosen)
    assert text_of(engine.generate(ids, max_tokens=1)) and engine.last.cached_tokens == len(ids) - 1


# ---- messages


def test_a_list_of_messages_is_a_conversation(engine):
    parts = [{"type": "text", "text": QUESTION[:8]}, {"type": "text", "text": QUESTION[8:]}]
    expected = text_of(engine.generate(PROMPT, max_tokens=12))
    assert text_of(engine.chat([{"role": "user", "content": parts}], max_tokens=12)) == expected
    assert text_of(engine.conversation().chat(parts, max_tokens=12)) == expected
    cases = (
        [],
        [{}],
        [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": "Join"}],
        [{"role": "tool", "content": "5"}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
    )
    for messages in cases:
        with pytest.raises(UserError):
            engine.chat(messages)
    assert text_of(engine.chat("And os.path.split?", max_tokens=2))  # the conversation before goes on
    assert engine.last.cached_tokens > 20


def test_reset_ends_the_conversation(engine):
    text_of(engine.chat(QUESTION, max_tokens=5))
    engine.reset()
    assert engine.position == 0
    text_of(engine.chat(QUESTION, max_tokens=1))
    assert engine.last.prompt_tokens == len(engine.tokenizer.encode(PROMPT))


def test_conversations_take_turns(engine):
    brief = engine.conversation("Be brief.", temperature=0.5)
    assert brief.sampling.temperature == 0.5
    other = engine.conversation()
    text_of(brief.chat(QUESTION, max_tokens=3))
    text_of(other.chat(QUESTION, max_tokens=3))
    text_of(engine.chat("Hello", max_tokens=3))
    other.reset()  # ends neither of the others
    assert [m["role"] for m in brief.messages] == ["system", "user", "assistant"] and other.messages == []
    text_of(engine.chat(QUESTION, max_tokens=1))
    assert engine.last.prompt_tokens > len(engine.tokenizer.encode(PROMPT))


def test_the_last_turn_is_taken_back(engine):
    conversation = engine.conversation("Be brief.")
    assert conversation.undo() is None
    text_of(conversation.chat(QUESTION, max_tokens=3))
    before = list(conversation.messages)
    text_of(conversation.chat("And os.path.split?", max_tokens=3))
    assert conversation.undo() == "And os.path.split?" and conversation.messages == before
    assert text_of(conversation.chat("And os.path.split?", max_tokens=3))
    assert engine.last.cached_tokens > 20


# ---- several callers


def test_iterators_take_turns(engine):
    alone = [list(engine.generate(ids, max_tokens=8)) for ids in (PROMPT, IDS[:5])]
    first, second = engine.generate(PROMPT, max_tokens=8), engine.generate(IDS[:5], max_tokens=8)
    made = [[next(first)], [next(second), next(second)]]
    logits = engine.prefill([1, 2, 3])  # the engine's own sequence beside them
    assert [made[0] + list(first), made[1] + list(second)] == alone
    engine.reset()
    assert (engine.prefill([1, 2, 3]) == logits).all()
    third = engine.chat(QUESTION)
    next(third)
    third.close()
    assert not engine._loop.busy


def test_threads_share_an_engine(engine):
    prompts = [
        f"<|im_start|>user\n{name}?<|im_end|>\n<|im_start|>assistant\n" for name in ("join", "split", "walk", "")
    ]
    alone = [text_of(engine.generate(prompt, max_tokens=8)) for prompt in prompts]
    found: dict[int, str] = {}

    def ask(i: int) -> None:
        found[i] = text_of(engine.generate(prompts[i], max_tokens=8))

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[i] for i in range(len(prompts))] == alone


def test_a_list_of_prompts_is_answered_together(engine):
    alone = [list(engine.generate(prompt, max_tokens=6)) for prompt in (PROMPT, IDS[:70])]
    pieces = list(engine.generate([PROMPT, engine.tokenizer.decode(IDS[:70])], max_tokens=6, n=2))
    assert {piece.index for piece in pieces} == {0, 1, 2, 3} and len(engine._last.answers) == 4
    for i in (0, 1):
        assert [piece.id for piece in pieces if piece.index == i] == [piece.id for piece in alone[0]]
    ids = [[1, 2, 3], [4]]
    assert {piece.index for piece in engine.generate(ids, max_tokens=1)} <= {0, 1}
    with pytest.raises(UserError, match="n is 0"):
        engine.generate(PROMPT, n=0)


def test_answers_share_random_numbers_with_no_others(engine):
    def answers(prompt, seed: int, n: int = 1) -> list[tuple[int, ...]]:
        pieces = list(engine.generate(prompt, max_tokens=8, n=n, temperature=3.0, seed=seed))
        count = max(piece.index for piece in pieces) + 1
        return [tuple(piece.id for piece in pieces if piece.index == i) for i in range(count)]

    several = [answers(PROMPT, seed, 8) for seed in (5, 6, (1 << 64) - 1)]
    assert len({one for found in several for one in found}) == 24
    assert several[0] == answers(PROMPT, 5, 8) and [several[0][0]] == answers(PROMPT, 5)
    assert answers([PROMPT] * 4, 5, 2) == several[0]


def test_asyncio(engine):
    alone = [text_of(engine.generate(prompt, max_tokens=12)) for prompt in (PROMPT, "import ", "def ")]

    async def ask(prompt: str) -> str:
        return "".join([piece.text async for piece in engine.agenerate(prompt, max_tokens=12)])

    async def left() -> None:
        async for _ in engine.agenerate(PROMPT):
            return

    async def all_of_them() -> list:
        return await asyncio.gather(ask(PROMPT), ask("import "), ask("def "), left())

    assert asyncio.run(all_of_them())[:3] == alone
    assert text_of(engine.generate(PROMPT, max_tokens=12)) == alone[0]


def test_whoever_starts_an_answer_waits_for_one_step(engine, monkeypatch):
    """However many steps follow each other, and however many start answers meanwhile."""
    loop = engine._loop
    steps, waited, step, start = [0], [], loop._step, loop.start

    def counted_step() -> bool:
        steps[0] += 1
        return step()

    def counted_start(*arguments) -> None:
        before = steps[0]
        start(*arguments)
        waited.append(steps[0] - before)

    async def ask(i: int) -> None:
        async for _ in engine.agenerate(IDS[i : i + 9], max_tokens=30, min_tokens=30):
            pass

    async def all_of_them() -> None:
        long = engine.agenerate(PROMPT, max_tokens=400, min_tokens=400)
        await anext(long)
        for i in range(2):
            await asyncio.gather(*(ask(8 * i + j) for j in range(8)))
        await long.aclose()

    monkeypatch.setattr(loop, "_step", counted_step)
    monkeypatch.setattr(loop, "start", counted_start)
    asyncio.run(all_of_them())
    assert len(waited) == 17 and max(waited) <= 2


def test_a_pause_ends_with_the_answer(engine):
    async def seconds(limit: int) -> float:
        stream = engine.agenerate(PROMPT, max_tokens=limit, min_tokens=limit)
        await stream.batch()
        begun = asyncio.get_running_loop().time()
        await stream.pause(20.0 if limit < 500 else 0.02)
        await stream.aclose()
        return asyncio.get_running_loop().time() - begun

    assert asyncio.run(seconds(20)) < 15
    assert asyncio.run(seconds(1500)) > 0.01


def test_a_generation_can_be_cancelled(engine):
    conversation, shown = engine.conversation(), ""
    for text in conversation.chat(QUESTION):
        shown += text
        if len(shown) > 20:
            engine.cancel()
    assert engine.last.finish == "interrupted" and conversation.messages[-1]["content"] == shown
    assert text_of(conversation.chat(QUESTION, max_tokens=2))  # a cancellation is that of one generation


def test_a_prompt_is_cancelled_between_two_chunks_and_goes_on_there(engine):
    seen = []

    def progress(done: int, total: int) -> None:
        seen.append((done, total))
        if done:
            engine.cancel()

    assert list(engine.generate(IDS, progress=progress)) == []
    assert seen == [(0, 600), (512, 600)] and engine.last.finish == "interrupted"
    made = [piece.id for piece in engine.generate(IDS, max_tokens=3)]
    assert engine.last.cached_tokens == 512
    engine.reset()
    assert [piece.id for piece in engine.generate(IDS, max_tokens=3)] == made
    conversation = engine.conversation()
    assert text_of(conversation.chat("word " * 600, progress=progress)) == "" and conversation.messages == []


# ---- the end


def test_a_closed_engine_says_so(demo_artifact):
    with Engine.load(demo_artifact, RunOptions(threads=1)) as engine:
        engine.prefill([1, 2, 3])
        assert "Llama" in repr(engine) and "cpu" in repr(engine) and "3 of 2048 tokens" in repr(engine)
    assert "closed" in repr(engine)
    engine.close()
    for use in (engine.reset, lambda: engine.prefill([1]), lambda: next(engine.chat("Hello"))):
        with pytest.raises(UserError, match="this engine is closed"):
            use()
