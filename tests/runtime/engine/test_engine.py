"""The engine: one result whatever the way through the cache, and what it does at the edges."""

import numpy as np
import pytest

from mlc_amd.runtime.artifact.artifact import Artifact
from mlc_amd.runtime.devices.opening import open_device
from mlc_amd.runtime.engine.chat import Conversation
from mlc_amd.runtime.engine.engine import Engine
from mlc_amd.runtime.engine.generation import ContextFull, Piece
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.sampling.settings import Sampling

IDS = np.random.default_rng(3).integers(0, 8000, 150).tolist()


@pytest.fixture
def engine(demo_artifact):
    return Engine.load(demo_artifact)


def close(a, b) -> bool:
    """Within 2e-3 of the logits' range."""
    return float(np.abs(a - b).max()) < 2e-3 * float(a.max() - a.min())


@pytest.fixture(scope="module")
def expected(demo_artifact):
    """Logits after all of IDS, in one go."""
    return Engine.load(demo_artifact).prefill(IDS)


@pytest.mark.parametrize("cuts", [(1,), (4,), (3, 7, 64, 65), (100, 101, 149), tuple(range(1, 150))])
def test_chunks_do_not_matter(engine, expected, cuts):
    for start, stop in zip((0, *cuts), (*cuts, len(IDS)), strict=True):
        logits = engine.prefill(IDS[start:stop])
    assert close(expected, logits)
    assert engine.tokens == IDS


def test_score_gives_what_prefill_and_decode_give(engine, expected):
    logits = engine.score(IDS)
    assert logits.shape == (len(IDS), engine.vocab)
    assert close(expected, logits[-1])
    engine.truncate(80)
    assert close(logits[80], engine.decode(IDS[80]))


def test_truncated_cache_continues(engine, expected):
    engine.prefill(IDS[:90])
    engine.prefill([5] * 60)
    engine.truncate(90)
    assert close(expected, engine.prefill(IDS[90:]))
    engine.reset()
    assert close(expected, engine.prefill(IDS))


def test_match_keeps_the_common_prefix_and_leaves_one_token(engine):
    engine.prefill([1, 2, 3, 4])
    assert engine.match([1, 2, 9, 4]) == 2
    assert engine.tokens == [1, 2]
    assert engine.match([1, 2]) == 1
    assert engine.match([7]) == 0


def test_context_full(engine):
    engine.prefill(IDS)
    with pytest.raises(ContextFull, match="do not fit the context of 2048"):
        engine.prefill([1] * 1899)
    assert engine.tokens == IDS
    engine.prefill([1] * 1898)  # to the last place
    with pytest.raises(ContextFull):
        engine.decode(1)


@pytest.mark.parametrize(
    ("ids", "message"), [([], "no tokens"), ([8192], "outside the vocabulary"), ([-1], "outside the vocabulary")]
)
def test_bad_ids(engine, ids, message):
    with pytest.raises(UserError, match=message):
        engine.prefill(ids)


def test_generate_streams_what_greedy_decoding_gives(engine):
    prompt = engine.tokenizer.encode("<|im_start|>user\nWhat does os.path.join do?<|im_end|>\n<|im_start|>assistant\n")
    pieces = list(engine.generate(prompt, max_tokens=20))
    assert engine.last.finish == "length"
    assert engine.last.generated == 20
    assert "Join two or more pathname components" in "".join(piece.text for piece in pieces)
    assert all(isinstance(piece, Piece) for piece in pieces)
    again = list(engine.generate(prompt, max_tokens=20))
    assert again == pieces
    longer = prompt + [piece.id for piece in pieces]
    list(engine.generate(longer, max_tokens=1))
    assert engine.last.cached_tokens == len(longer) - 1


def test_generate_ends(engine):
    prompt = engine.tokenizer.encode("<|im_start|>user\nWhat does os.path.join do?<|im_end|>\n<|im_start|>assistant\n")
    text = "".join(piece.text for piece in engine.generate(prompt, stop=["pathname comp"]))
    assert engine.last.finish == "stop"
    assert text.endswith("two or more ")
    list(engine.generate(prompt))
    assert engine.last.finish == "stop"
    engine.reset()
    full = [1] * 2040
    list(engine.generate(full, Sampling(temperature=5.0, seed=1)))
    assert engine.last.finish in ("context", "stop")
    assert engine.position <= 2048


def test_same_seed_same_text(engine):
    prompt = engine.tokenizer.encode("The")
    run = lambda seed: [p.id for p in engine.generate(prompt, Sampling(temperature=1.5, seed=seed), max_tokens=24)]  # noqa: E731
    first = run(11)
    assert run(11) == first
    assert run(12) != first


def test_the_models_sampling_parameters_are_the_default(demo_artifact):
    artifact = Artifact.open(demo_artifact)
    artifact.manifest["sampling"] = {"repetition_penalty": 3.0}
    engine = Engine(artifact, open_device(artifact))
    assert Conversation(engine).sampling == engine.sampling == Sampling(repetition_penalty=3.0)
    ids = engine.tokenizer.encode("x = 1\nx = 1\nx = 1\n")  # greedily, it goes on like this
    made = [
        [piece.id for piece in engine.generate(ids, sampling, 12)] for sampling in (None, engine.sampling, Sampling())
    ]
    assert made[0] == made[1] != made[2]


def test_chat_keeps_its_conversation(engine):
    answer = "".join(engine.chat("What does os.path.join do?", max_tokens=60))
    assert "Join two or more pathname components" in answer
    held = engine.last.prompt_tokens + engine.last.generated
    "".join(engine.chat("And os.path.split?", max_tokens=5))
    assert engine.last.cached_tokens >= held - 1
    assert "Join" in "".join(engine.chat([{"role": "user", "content": "What does os.path.join do?"}], max_tokens=30))


def test_gguf_must_be_compiled(demo_gguf):
    with pytest.raises(UserError, match="mlc-amd compile"):
        Engine.load(demo_gguf)


def test_advance_gives_the_same_logits_without_keeping_them(engine):
    kept = engine.prefill(IDS[:20])
    engine.reset()
    view = engine.advance(IDS[:20])
    assert (view == kept).all()
    engine.decode(1)
    assert not (view == kept).all()
