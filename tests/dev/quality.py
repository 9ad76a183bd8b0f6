"""The quality bar: an engine against exact logits and llama.cpp's greedy texts of the reference models (`shared/refs`).

Of each model there are the logits of a float32 computation with exactly dequantized weights, llama.cpp's mean
Kullback-Leibler divergence from them, and greedy texts with the margin of every step.
"""

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np

MODELS = (
    "llama-q4_k_m", "llamaspm-q8_0", "qwen2-q4_k_m", "qwen3-f16", "qwen3-iq4_xs", "qwen3-q2_k", "qwen3-q3_k_m",
    "qwen3-q4_0",
    "qwen3-q4_k_m", "qwen3-q5_0", "qwen3-q5_k_m", "qwen3-q6_k", "qwen3-q8_0",
)  # fmt: skip
TIE = 0.25  # logits; below this margin either token is right
LEAST_KL, KL_OF_LLAMACPP = 1e-3, 1.5
PERPLEXITY = 0.01  # relative


class Logits(NamedTuple):
    """kl: mean divergence, kl_bar: what it may be; perplexity: relative difference from the exact one."""

    kl: float
    kl_bar: float
    perplexity: float

    @property
    def good(self) -> bool:
        return self.kl <= self.kl_bar and abs(self.perplexity) < PERPLEXITY


class Reference:
    """The reference results of one model."""

    def __init__(self, shared: Path, name: str):
        self.arrays, self.facts = (
            np.load(shared / "refs" / f"{name}.npz"),
            json.loads((shared / "refs" / f"{name}.json").read_text()),
        )

    def logits(self, engine) -> Logits:
        summary, ids = self.facts["summary"], self.arrays["ids"]
        engine.reset()
        logits = engine.score(ids)
        kl = kl_divergence(self.arrays["logits"], logits[self.arrays["positions"]])
        perplexity = np.exp(-log_softmax(logits)[np.arange(len(ids) - 1), ids[1:]].mean())
        return Logits(
            kl,
            max(KL_OF_LLAMACPP * summary["kl_llamacpp_vs_exact_mean"], LEAST_KL),
            perplexity / summary["ppl_exact"] - 1,
        )

    def greedy(self, engine, tokens: int | None = None) -> tuple[int, int]:
        """(tokens compared, tokens that differ) of all texts, each up to its first tie or the first difference;
        `tokens`: of each text."""
        compared = wrong = 0
        for text in self.facts["greedy"]:
            engine.reset()
            logits = engine.prefill(text["prompt_ids"])
            for token, margin in list(zip(text["greedy_ids"], text["margins"], strict=True))[:tokens]:
                if margin < TIE:
                    break
                compared += 1
                if int(logits.argmax()) != token:
                    wrong += 1
                    break
                logits = engine.decode(token)
        return compared, wrong


def log_softmax(x) -> np.ndarray:
    x = np.asarray(x, np.float64)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def kl_divergence(exact, ours) -> float:
    """Mean over rows of KL(exact || ours), in nats."""
    p, q = log_softmax(exact), log_softmax(ours)
    return float((np.exp(p) * (p - q)).sum(-1).mean())
