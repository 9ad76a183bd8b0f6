"""Tiny models as those of architectures.py: with a layer of multi-token prediction, and others that ../shared has."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np

from mlc_amd.compiler.gguf import GGUFModel, synthetic
from tests.support.architectures import DELTA_NET, MODELS


def _predictor(layer: int, *own: str) -> tuple[str, ...]:
    """The tensors of a layer of multi-token prediction that tell that there is one, and `own` ones."""
    names = "attn_norm", *(f"nextn.{name}" for name in ("eh_proj", "enorm", "hnorm", *own))
    return tuple(f"blk.{layer}.{name}.weight" for name in names)


# with a layer of multi-token prediction after the others
PREDICTING: dict[str, tuple[dict[str, object], tuple[str, ...]]] = {
    "qwen35": (DELTA_NET | {"block_count": 3, "nextn_predict_layers": 1}, _predictor(2, "shared_head_norm")),
    "glm4moe": (
        MODELS["glm4moe"][0] | {"block_count": 3, "nextn_predict_layers": 1},
        (*MODELS["glm4moe"][1], *_predictor(2, "shared_head_head", "embed_tokens")),
    ),
    "deepseek2": (
        MODELS["deepseek2"][0] | {"block_count": 4, "nextn_predict_layers": 2},
        (*MODELS["deepseek2"][1], *_predictor(2, "shared_head_norm")),
    ),
}


def predicting(name: str) -> GGUFModel:
    """The model of that name in PREDICTING, with random weights."""
    keys, tensors = PREDICTING[name]
    return synthetic("tiny-qwen2:f16", keys={"general.architecture": name} | keys, tensors=tensors)


def referenced(shared: Path, name: str, path: Path) -> tuple[dict, dict[str, np.ndarray]]:
    """Writes a random f16 model of an architecture, 512 tokens of context, to `path` (GGUF). shared: the folder of
    reference data. Returns its description and, computed by llama.cpp from the same weights in float32, the logits
    [n, vocab] after the n `positions` of `ids`."""
    folder = shared / "archs"
    facts = json.loads((folder / "refs" / f"{name}-0.json").read_text())
    command = [sys.executable, str(folder / "mkarch.py"), name, str(path), "--variant", "0", "--seed", facts["seed"]]
    subprocess.run([str(part) for part in command], check=True, capture_output=True, cwd=path.parent)
    return facts, dict(np.load(folder / "refs" / f"{name}-0.npz"))
