"""Metadata in place of a file's: --override-kv."""

import pytest

from mlc_amd.compiler.gguf.overrides import overrides
from mlc_amd.compiler.gguf.reader import GGUFModel
from mlc_amd.compiler.gguf.synthetic import synthetic
from mlc_amd.runtime.errors import UsageError, UserError


def test_values_take_the_place_of_the_files(demo_gguf):
    texts = "llama.rope.freq_base=float:5e5", "llama.context_length=int:64", "general.name=str:a=b:c", "x.y=bool:true"
    given = overrides(texts)
    assert given["x.y"] is True
    with GGUFModel.open(demo_gguf, overrides=given) as model:
        assert model.config.ropes["rope"].base == 5e5 and model.config.context == 64 and model.config.name == "a=b:c"


def test_values_of_a_synthetic_model():
    model = synthetic("tiny:q4_0", keys=overrides(["llama.block_count=int:1"]))
    assert len(model.config.layers) == 1


@pytest.mark.parametrize("text", ["", "a", "a=1", "a=int:x", "a=bool:1", "a=long:1", "=int:1"])
def test_malformed(text):
    with pytest.raises(UsageError, match="it must be KEY=TYPE:VALUE"):
        overrides([text])


def test_impossible_values_are_those_of_a_file(demo_gguf):
    with pytest.raises(UserError, match="context_length is 'x', expected an integer"):
        GGUFModel.open(demo_gguf, overrides=overrides(["llama.context_length=str:x"]))
