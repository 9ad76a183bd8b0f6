"""States of answers under a grammar."""

import numpy as np
import pytest
from vocabularies import build_tokenizer, read_metadata

from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.grammars.constraints import mask_of
from mlc_amd.runtime.grammars.grammars import Grammars

pytest.importorskip("llguidance")


@pytest.fixture(scope="module")
def grammars(demo_gguf, tmp_path_factory):
    tokenizer = build_tokenizer(read_metadata(demo_gguf), tmp_path_factory.mktemp("vocabulary"))
    made = Grammars(tokenizer, tokenizer.vocab_size)
    yield made
    made.close()


def test_answers_of_a_grammar_do_not_share_their_state(grammars):
    grammar = grammars.regex("[a-z]{2}[0-9]{2}")
    one, other = grammar(), grammar()
    before = one.allowed().copy()
    tokens = np.flatnonzero(np.unpackbits(before.view(np.uint8), bitorder="little")).tolist()
    token = next(token for token in tokens if len(grammars._tokenizer.decode([token])) == 1)
    one.accept(token)
    assert one.allowed().tolist() != before.tolist() == other.allowed().tolist()


def test_one_that_fails_leaves_the_others_alone(grammars):
    fails, *others = (grammars.regex("[a-z]{9}")() for _ in range(3))
    with pytest.raises(UserError, match="the answer cannot follow its grammar"):
        fails.accept(grammars._control.ids.get("</s>", next(iter(grammars._ends))))
    assert all(mask_of(one, grammars._vocab) is not None for one in others)
    with pytest.raises(UserError, match="the answer cannot follow its grammar"):
        fails.allowed()


def test_a_broken_installation(grammars, monkeypatch, tmp_path):
    """The process that tries grammars cannot import llguidance: that is not the schema's fault."""
    (tmp_path / "llguidance.py").write_text("raise ImportError('broken')")
    monkeypatch.syspath_prepend(tmp_path)
    broken = Grammars(grammars._tokenizer, grammars._vocab)
    with pytest.raises(UserError, match="process that tries them does not start"):
        broken.json_schema({"type": "integer"})
    broken.close()
