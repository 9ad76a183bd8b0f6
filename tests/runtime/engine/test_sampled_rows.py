"""The device's parameters for the rows of a step that get a token."""

import numpy as np

from mlc_amd.runtime.engine.sampled_rows import GREEDY, SampledRows, TokenChoice
from mlc_amd.runtime.sampling.device_rows import mask_words
from mlc_amd.runtime.sampling.layout import ALL_ALLOWED, CHANGES, FIELDS
from mlc_amd.runtime.sampling.settings import Sampling

VOCAB, ROWS = 100, 8
IO = {"allowed": {"shape": [ROWS, -(-VOCAB // 32)]}}


class Written(dict):
    """The last values of each io buffer."""

    def write(self, name, values):
        self[name] = np.array(values)


def test_a_mask_that_leaves_few_tokens_needs_no_top_k():
    device = Written()
    rows = SampledRows(device, IO, VOCAB)
    sampling = Sampling(temperature=1.0, top_k=10)
    masks = [mask_words(np.arange(VOCAB) < count) for count in (10, 11, 100, 1)]
    choices = [GREEDY, TokenChoice(sampling, 1, ()), *(TokenChoice(sampling, 1, (), mask) for mask in masks)]
    for _ in range(2):  # nothing is left of the step before
        rows.write(choices)
        assert device["sampling"][:, FIELDS.index("top_k")].tolist()[1:] == [10, 0, 10, 10, 0]
        listed = device["sampling"].view(np.float32)[:, FIELDS.index("min_p")] == np.float32(ALL_ALLOWED)
        assert listed.tolist() == [False, False, True, False, False, True]
        assert device["allowed"][2:].tolist() == [mask.tolist() for mask in masks]
    penalized = Sampling(temperature=1.0, top_k=10, presence_penalty=0.5)
    rows.write([TokenChoice(penalized, 1, (3,), masks[0]), TokenChoice(penalized, 1, (3,), masks[1])])
    assert device["sampling"][:, FIELDS.index("top_k")].tolist() == [0, 10]
    assert device["changes"].shape == (2, CHANGES, 2)
