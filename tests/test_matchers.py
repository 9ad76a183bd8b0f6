"""The masks of several answers, computed side by side."""

import numpy as np
import pytest
from vocabularies import build_tokenizer, read_metadata

from mlc_amd.runtime import matchers
from mlc_amd.runtime.constraints import compute_masks, mask_of
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.grammars import Grammars

pytest.importorskip("llguidance")


@pytest.fixture(scope="module")
def grammars(demo_gguf, tmp_path_factory):
    tokenizer = build_tokenizer(read_metadata(demo_gguf), tmp_path_factory.mktemp("vocabulary"))
    made = Grammars(tokenizer, tokenizer.vocab_size)
    yield made
    made.close()


@pytest.mark.parametrize("worth", [-1.0, 0.0, 1e9], ids=["beside", "measured", "alone"])
def test_masks_are_those_of_each_alone(grammars, monkeypatch, worth):
    monkeypatch.setattr(matchers, "_WORTH", worth)
    texts = grammars.json_schema({"type": "array", "items": {"type": "string"}, "minItems": 30})
    made = [texts, grammars.regex("[a-z ]{80,}"), grammars.regex("x[0-9]{80,}y"), texts]
    together, alone = ([grammar() for grammar in made] for _ in range(2))
    rng = np.random.default_rng(3)
    for _ in range(12):
        compute_masks([*together, None])
        for one, other in zip(together, alone, strict=True):
            mask = mask_of(one, grammars._vocab)
            assert mask is not None and mask.tolist() == other.allowed().tolist()
            may = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            token = int(rng.choice(may))
            one.accept(token)
            other.accept(token)


def test_one_that_fails_leaves_the_others_alone(grammars, monkeypatch):
    monkeypatch.setattr(matchers, "_WORTH", -1.0)
    fails, *others = (grammars.regex("[a-z]{9}")() for _ in range(3))
    with pytest.raises(UserError, match="the answer cannot follow its grammar"):
        fails.accept(grammars._control.ids.get("</s>", next(iter(grammars._ends))))
    compute_masks([fails, *others])
    assert all(mask_of(one, grammars._vocab) is not None for one in others)
    with pytest.raises(UserError, match="the answer cannot follow its grammar"):
        fails.allowed()
