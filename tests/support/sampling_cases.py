"""Rows of logits and the ways to sample them, for the tests of every target's kernel: it must choose as the host's
sampler does."""

from dataclasses import dataclass, field

import numpy as np

from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.sampling.device_rows import mask_words, write_row
from mlc_amd.runtime.sampling.layout import row_shapes
from mlc_amd.runtime.sampling.philox import uniform
from mlc_amd.runtime.sampling.sampler import Sampler
from mlc_amd.runtime.sampling.settings import Sampling

SEED = 77  # of rows whose sampling has none
MARGIN = 1e-6  # of the probability mass: how far rounding may move the borders between tokens


@dataclass(frozen=True)
class SamplingRow:
    """One row: its logits, float32 [vocab], and what is wanted of it. allowed: bool [vocab] or None."""

    logits: np.ndarray
    sampling: Sampling
    recent: tuple = ()
    position: int = 5
    allowed: np.ndarray | None = field(default=None, compare=False)
    logprob: bool = True

    @property
    def expected(self) -> int:
        """The host's choice; -1 where it refuses the logits."""
        sampler = Sampler(self.sampling if self.sampling.seed is not None else self.sampling.changed(seed=SEED))
        try:
            return sampler.sample(self.logits, self.recent, self.position, self.allowed)
        except UserError:
            return -1

    def near(self, token: int) -> bool:
        """Whether the host chooses this token for a random number, or a top-p, next to the row's."""
        seed = SEED if self.sampling.seed is None else self.sampling.seed
        choices = set()
        for shift in (-MARGIN, MARGIN):
            sampler = Sampler(self.sampling.changed(top_p=min(max(self.sampling.top_p + shift, 0.0), 1.0)))
            found, weights = sampler.left(self.logits, self.recent, self.allowed)
            ids = np.arange(len(weights)) if found is None else found
            total = np.cumsum(weights.astype(np.float64)) / weights.sum(dtype=np.float64)
            for point in (uniform(seed, self.position) + shift, uniform(seed, self.position)):
                choices.add(int(ids[min(np.searchsorted(total, point, side="right"), len(ids) - 1)]))
        return token in choices


def inputs(rows: list[SamplingRow], columns: int, n: int | None = None) -> dict[str, np.ndarray]:
    """The kernel's inputs by name, for n rows (those beyond the given ones hold nonsense)."""
    n = n or len(rows)
    arrays = {"Logits": np.full((n, columns), 1e5, np.float32)}  # the padding must not be chosen
    arrays |= {name: np.full(shape, -1, np.int32) for name, shape in row_shapes(n, columns).items()}
    for i, row in enumerate(rows):
        vocab = len(row.logits)
        arrays["Logits"][i, :vocab] = row.logits
        if row.allowed is not None:
            bits = mask_words(row.allowed)
            arrays["allowed"][i, : len(bits)] = bits
        write_row(
            arrays["sampling"][i], arrays["changes"][i], row.sampling, row.recent, row.position, SEED, vocab,
            row.logprob, row.allowed is not None,
        )  # fmt: skip
    return arrays


def outputs(n: int, columns: int) -> dict[str, np.ndarray]:
    return {
        "Sampled": np.full(n, -7, np.int32), "LogProbs": np.full(n, 7, np.float32),
        "Adjusted": np.full((n, columns), np.nan, np.float32),
    }  # fmt: skip


def check(rows: list[SamplingRow], sampled: np.ndarray, logprobs: np.ndarray) -> None:
    """That the device chose what the host does, but for rounding, in all but a few rows."""
    expected = np.array([row.expected for row in rows])
    for i in np.flatnonzero(expected != sampled[: len(rows)]):
        assert expected[i] >= 0 and rows[i].near(int(sampled[i])), (i, rows[i].sampling, expected[i], sampled[i])
    for row, token, found in zip(rows, sampled, logprobs, strict=False):
        if token >= 0:
            exact = row.logits.astype(np.float64)
            exact -= exact.max()
            wanted = exact[token] - np.log(np.exp(exact).sum()) if row.logprob else 0.0
            assert abs(found - wanted) < 2e-5 * max(1.0, abs(wanted)), (row.sampling, found, wanted)


def gaussian(vocab: int, seed: int, spread: float = 3.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(vocab) * spread).astype(np.float32)


def some_allowed(vocab: int, count: int, seed: int = 0) -> np.ndarray:
    allowed = np.zeros(vocab, bool)
    allowed[np.random.default_rng(seed).choice(vocab, count, replace=False)] = True
    return allowed


# ways to sample; each is used at several positions, with logits of several shapes
SETTINGS = {
    "temperature": {"temperature": 1.0}, "hot": {"temperature": 5.0}, "cold": {"temperature": 0.01},
    "top_k": {"temperature": 1.0, "top_k": 40}, "large top_k": {"temperature": 2.0, "top_k": 2500},
    "top_k 2": {"temperature": 0.7, "top_k": 2}, "all of top_k": {"temperature": 1.0, "top_k": 1 << 20},
    "top_p": {"temperature": 1.0, "top_p": 0.9}, "small top_p": {"temperature": 1.0, "top_p": 0.01},
    "large top_p": {"temperature": 1.5, "top_p": 0.9999},
    "min_p": {"temperature": 1.3, "min_p": 0.05}, "tiny min_p": {"temperature": 1.3, "min_p": 1e-7},
    "min_p of 1": {"temperature": 1.0, "min_p": 1.0},
    "top_k and top_p": {"temperature": 0.8, "top_k": 50, "top_p": 0.8},
    "all filters": {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05},
    "large top_k and top_p": {"temperature": 1.0, "top_k": 3000, "top_p": 0.99},
}  # fmt: skip
PENALTIES = {
    "repetition": {"repetition_penalty": 1.3}, "presence": {"presence_penalty": 2.0},
    "frequency": {"frequency_penalty": 0.7, "repetition_window": 20},
    "all": {"repetition_penalty": 1.1, "presence_penalty": -0.5, "frequency_penalty": 0.1},
    "bias": {"logit_bias": {3: 9.0, 17: -100.0, 4: 8.5}},
    "bias and repetition": {"logit_bias": {3: 9.0}, "repetition_penalty": 0.8},
}  # fmt: skip


def shapes(vocab: int) -> dict[str, np.ndarray]:
    """Logits as models make them, and such as make a search difficult."""
    rng = np.random.default_rng(vocab)
    ties = np.round(gaussian(vocab, 5)).astype(np.float32)
    peaked = gaussian(vocab, 6, 1.0)
    peaked[vocab // 2] = 30.0
    last = gaussian(vocab, 6, 1.0)
    last[-1] = 30.0
    # many likely tokens next to one another
    sorted_ = np.sort(gaussian(vocab, 10, 4.0))
    return {
        "model": gaussian(vocab, 4), "ties": ties, "peaked": peaked, "last": last, "flat": gaussian(vocab, 7, 0.01),
        "sorted": sorted_,
        "equal": np.full(vocab, -2.5, np.float32), "wide": gaussian(vocab, 8, 40.0),
        "zeros": np.where(rng.random(vocab) < 0.5, np.float32(0.0), np.float32(-0.0)),
    }  # fmt: skip


def filtered(vocab: int) -> list[SamplingRow]:
    found = shapes(vocab)
    return [
        SamplingRow(logits, Sampling(seed=i, **settings), position=100 * i + len(name))
        for name, logits in found.items()
        for i, settings in enumerate(SETTINGS.values())
    ]


def changed(vocab: int) -> list[SamplingRow]:
    logits, rng = gaussian(vocab, 9), np.random.default_rng(1)
    likely = np.argsort(-logits)[:30]
    recent = tuple(int(t) for t in np.concatenate([rng.integers(0, vocab, 50), rng.choice(likely, 40)]))
    rows = []
    for base in ({}, {"temperature": 1.0}, {"temperature": 0.9, "top_k": 20, "top_p": 0.9}):
        rows += [SamplingRow(logits, Sampling(seed=3, **base, **penalties), recent) for penalties in PENALTIES.values()]
        rows.append(SamplingRow(logits, Sampling(seed=4, **base), allowed=some_allowed(vocab, 5), position=9))
        rows.append(
            SamplingRow(logits, Sampling(seed=5, **base, **PENALTIES["all"]), recent, 3, some_allowed(vocab, 2))
        )
    many = tuple(range(0, min(vocab, 600)))
    rows.append(SamplingRow(logits, Sampling(repetition_penalty=3.0, repetition_window=1000, temperature=1.0), many))
    return rows


def greedy(vocab: int) -> list[SamplingRow]:
    found = [SamplingRow(logits, Sampling(), logprob=i % 2 == 0) for i, logits in enumerate(shapes(vocab).values())]
    found += [
        SamplingRow(gaussian(vocab, 3), Sampling(temperature=1.0, top_k=1)),
        SamplingRow(gaussian(vocab, 3), Sampling(top_p=0.0)),
    ]
    last = gaussian(vocab, 2)
    last[-1] = 20.0
    return [*found, SamplingRow(last, Sampling())]


def broken(vocab: int) -> list[SamplingRow]:
    rows = []
    for i, bad in enumerate((np.nan, np.inf, -np.inf)):
        for sampling in (Sampling(), Sampling(temperature=1.0, top_k=10), Sampling(temperature=1.0)):
            logits = gaussian(vocab, i)
            logits[(vocab - 1, 0, vocab // 2)[i]] = bad
            rows.append(SamplingRow(logits, sampling))
    return rows


GROUPS = {"greedy": greedy, "changed": changed, "broken": broken, "filtered": filtered}
