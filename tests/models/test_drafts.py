"""Drafts that read a model's rows (eagle3, dflash, gemma4-assistant): guesses are llama.cpp's, and answers do not
depend on them.

tests/fixtures/drafts.npz: of the cases of tests/support/drafts.py, in float32, after the tokens `ids` and "<name>
next", llama.cpp's logits of three guesses: the first ones, each made after the one before; of blocks of six rows the
first two and the last. -inf: not in the draft's vocabulary.
"""

from dataclasses import replace
from pathlib import Path

import drafts
import gguf
import numpy as np
import pytest
import vulkan_harness
from residues import Residues

from mlc_amd.compiler.gguf import GGUFModel
from mlc_amd.compiler.gguf.draft import DraftFile
from mlc_amd.compiler.gguf.tensor import Tensor
from mlc_amd.compiler.gguf.writer import write_gguf
from mlc_amd.compiler.models.registry import read_config
from mlc_amd.compiler.pipeline import check, compile_model
from mlc_amd.runtime.cache.sequence import ChunkRows
from mlc_amd.runtime.engine.engine import Engine
from mlc_amd.runtime.engine.sampled_rows import GREEDY
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.options import CompileOptions, LoadOptions
from mlc_amd.runtime.speculation.own_draft import OwnDraft
from mlc_amd.tools.commands import inspect
from mlc_amd.tools.hub.models import load_engine
from tests.runtime.engine.test_speculation import follow_prompt, guess_always

EXACT = np.load(Path(__file__).parents[1] / "fixtures" / "drafts.npz")
IDS = EXACT["ids"].tolist()
KL = 2e-5
ROWS = (0, 1, 5)  # of a block, in the fixture
CASES = [("eagle3", "cpu"), ("dflash-window", "cpu"), ("gemma4-assistant", "cpu")]
CASES += [
    pytest.param(case, marks=pytest.mark.full)
    for case in (("eagle3-shared", "cpu"), ("dflash", "cpu"), ("eagle3", "vulkan"), ("dflash-window", "vulkan"))
]


def with_draft(model: GGUFModel, name: str, folder: Path, **changed) -> GGUFModel:
    path = drafts.write_draft(name, model.config, folder / f"{name}.gguf", model.metadata, **changed)
    model.add_draft(DraftFile(path, model.config))
    return model


def load(model, target, out):
    arch = "native" if target == "cpu" else "generic"
    with model:
        compile_model(model, out, CompileOptions(target=target, arch=arch, ctx=256, tuned="none"))
    return Engine.load(out)


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(case))
def case(request, tmp_path_factory):
    """(name, engine)"""
    name, target = request.param
    if target == "vulkan":
        vulkan_harness.gpu()  # skips without a device
    folder = tmp_path_factory.mktemp("draft")
    with load(with_draft(drafts.target(name, "f32"), name, folder), target, folder / "model") as engine:
        yield name, engine


def divergence(expected: np.ndarray, found: np.ndarray) -> float:
    """The KL divergence of logits, of the tokens that the draft knows."""
    known = np.isfinite(expected)
    assert known.all() or found[~known].max() < found[known].min()
    exact, ours = (np.exp(logits[known].astype(np.float64) - logits[known].max()) for logits in (expected, found))
    exact, ours = exact / exact.sum(), ours / ours.sum()
    return float((exact * np.log(exact / ours)).sum())


def test_guesses_are_those_of_llama_cpp(case):
    """The prompt in two chunks, then single rows, one of them a wrong guess."""
    name, engine = case
    engine.reset()
    runner, own, expected, following = engine._runner, engine._own, EXACT[name], int(EXACT[f"{name} next"])

    def check_row(guess, depth, row=0):
        logits = engine.device.read("logits", row + 1)[row, : engine.vocab]
        assert divergence(expected[depth], logits) < KL
        assert guess == expected[depth].argmax()

    follow_prompt(engine, IDS, (40, 28))
    for token, after in ((IDS[68], [IDS[69], 3]), (IDS[69], [following])):
        assert own.reserve(1, 7)
        engine.cache.assign_slots([own])
        chosen = runner.sample(own.rows([token, *after[:-1]]), None, [GREEDY] * len(after))
        guesses = runner.follow(after)
        own.advance(1, len(after) - 1)
    assert chosen[0].token == following
    draft = engine.config["draft"]
    if size := draft["block"]:
        tokens = [following] + [draft["mask"]] * (size - 1)
        guesses = runner.block(ChunkRows(tokens, own.computed, own.table_row, together=size))
        for depth, row in enumerate(ROWS):
            check_row(guesses[row], depth, row)
        return
    check_row(guesses[0], 0)
    for depth in (1, 2):
        position = own.computed - 1 + depth * draft["own_keys"]
        guesses = runner.chain([(guesses[0], position, own.table_row)], [0])
        check_row(guesses[0], depth)


def answers(engine, prompts=(IDS[:40], IDS[:3], IDS[20:]), count=30, **options):
    found: dict[int, list[int]] = {}
    for piece in engine.generate(list(prompts), max_tokens=count, **options):
        found.setdefault(piece.index, []).append(piece.id)
    return found


@pytest.mark.parametrize("constrained", [False, True])
@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": 0.8, "seed": 3, "top_k": 5}], ids=str)
def test_answers_do_not_depend_on_guesses(case, options, constrained):
    """Nor on what the cache has of them."""
    _, engine = case
    if constrained:
        options = options | {"constraint": lambda: Residues(engine.vocab, engine.tokenizer.end_ids)}
    engine.speculate(None)
    engine.reset()
    expected = answers(engine, count=16, **options)
    guess_always(engine)
    engine.reset()
    assert answers(engine, count=16, **options) == expected
    assert answers(engine, count=16, **options) == expected  # prompts are in the cache
    assert engine.guesses.drafted
    engine.speculate(None)


def repeating(name: str, folder: Path) -> GGUFModel:
    """A model that repeats the last token, as layers add nothing, and a draft that guesses so: its row is the row of
    the model, or made of the token."""
    model = drafts.target(name, "f32")
    stored, hidden = dict(model.stored), model.config.hidden
    for tensor in list(stored):
        if tensor.endswith(("ffn_down.weight", "attn_output.weight")) or tensor.endswith("proj.weight"):
            stored[tensor] = stored[tensor].zeros(tensor)
    model = GGUFModel("repeating", model.metadata, stored, read_config(model.metadata, stored, "repeating"))
    with_draft(model, name, folder)
    config = model.config
    assert config.draft

    def put(tensor: str, values: np.ndarray) -> None:
        assert model.tensors[tensor].shape == values.shape
        model.tensors[tensor] = Tensor.made(tensor, values.shape, lambda: values.astype(np.float32))

    own = [tensor for tensor in model.tensors if tensor.startswith(tuple(f"blk.{i}." for i in (4, 5, 6)))]
    embedding = stored["token_embd.weight"].dequantize()
    for tensor in own:
        if tensor.endswith(("ffn_down.weight", "attn_output.weight")):
            put(tensor, np.zeros(model.tensors[tensor].shape))
    if name == "gemma4-assistant":
        projection = np.random.default_rng(0).normal(size=(config.draft.hidden, hidden))
        put("draft.nextn.pre_projection.weight", np.concatenate([projection, 0 * projection], 1))
        put("draft.token_embd.weight", embedding @ projection.T)
        put("draft.output_norm.weight", np.ones(config.draft.hidden))
    else:
        put("draft.fc.weight", np.eye(hidden, len(config.kept) * hidden))
        put("draft.output_norm.weight", np.ones(hidden))
    if name.startswith("eagle3"):
        put("draft.enc.output_norm.weight", np.ones(len(config.kept) * hidden))
    return model


@pytest.mark.parametrize("name", ["eagle3-shared", "gemma4-assistant"])
def test_right_guesses_count(name, tmp_path):
    with load(repeating(name, tmp_path), "cpu", tmp_path / "model") as engine:
        guess_always(engine)
        found = answers(engine, temperature=0.0)
        assert [set(tokens) for tokens in found.values()] == [{IDS[39]}, {IDS[2]}, {IDS[-1]}]
        guessed, accepted = engine.guesses
        assert accepted == guessed > 60


def test_inspect_says_what_the_draft_is(case):
    _, engine = case
    lines = [line.split() for line in inspect._model(engine.config).splitlines()]
    assert ["draft", "architecture", engine.config["draft"]["architecture"]] in lines
    assert not any("{" in word for line in lines for word in line)


@pytest.mark.full
def test_a_file_that_is_named_as_the_draft(tmp_path, monkeypatch):
    """It is compiled with the model, and an artifact that has it uses it as the model's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = repeating("eagle3-shared", tmp_path)
    path, draft = tmp_path / "model.gguf", str(tmp_path / "eagle3-shared.gguf")
    write_gguf(model, path)
    options = LoadOptions(model=path, target="cpu", ctx=256)
    found = []
    for given in ({}, {"draft": draft}):
        with load_engine(replace(options, **given)) as engine:
            found.append(answers(engine, temperature=0.0))
            artifact, speculation = engine.artifact.path, engine._loop.speculation
    assert found[0] == found[1] and isinstance(speculation.drafter, OwnDraft)
    with load_engine(LoadOptions(model=artifact, draft="mtp")) as engine:
        assert engine.config["draft"]["file"] == draft
    with pytest.raises(UserError, match="was compiled with --drafter"):
        load_engine(LoadOptions(model=artifact, drafter=path))


def test_what_does_not_fit(tmp_path):
    model = drafts.target("eagle3")
    path = drafts.write_draft("eagle3", model.config, tmp_path / "draft.gguf", model.metadata)
    with pytest.raises(UserError, match="eagle3 files hold a draft: give its model"):
        GGUFModel.open(path)
    other = drafts.target("gemma4-assistant")
    wrong = drafts.write_draft("gemma4-assistant", other.config, tmp_path / "other.gguf", other.metadata)
    with pytest.raises(UserError, match="for gemma4 models, not qwen3"):
        DraftFile(wrong, model.config)
    with pytest.raises(UserError, match="for another model"):
        DraftFile(path, with_draft(model, "dflash", tmp_path).config.__class__(**vars(other.config) | {"hidden": 64}))
    data = bytearray(path.read_bytes())
    tokens = next(tensor for tensor in gguf.GGUFReader(path).tensors if tensor.name == "d2t")
    data[tokens.data_offset + 7] = 0x70
    (tmp_path / "damaged.gguf").write_bytes(data)
    with pytest.raises(UserError, match="d2t has tokens that the model lacks"):
        DraftFile(tmp_path / "damaged.gguf", drafts.target("eagle3").config)
    with pytest.raises(UserError, match="--split tensor is for models without"):
        check(model, tmp_path / "out", CompileOptions(target="vulkan", arch="generic", split="tensor", gpus=2))
