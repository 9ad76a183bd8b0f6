"""Artifacts without weights: what devices fill in has the places of the real weights and the sizes of a model's."""

import functools
import json
import mmap
from pathlib import Path

import numpy as np
import pytest
import tvm

from mlc_amd.compiler.gguf.synthetic import synthetic
from mlc_amd.compiler.pipeline import compile_model
from mlc_amd.compiler.quant.draws import draws
from mlc_amd.runtime.artifact import random_weights
from mlc_amd.runtime.artifact.artifact import Artifact
from mlc_amd.runtime.artifact.random_weights import RandomWeights
from mlc_amd.runtime.artifact.weight_block import ALIGN, TensorSpec
from mlc_amd.runtime.artifact.weights_file import Weights, WeightsWriter
from mlc_amd.runtime.engine.engine import Engine
from mlc_amd.runtime.options import CompileOptions
from mlc_amd.schedules.cpu.linear.planes import dequantize, planes
from mlc_amd.schedules.formats import FORMATS

K, ROWS = 512, 256


@pytest.fixture(scope="module")
def vectors(tmp_path_factory) -> Weights:
    """A weights file with two norms."""
    place = tmp_path_factory.mktemp("vectors") / "weights.safetensors"
    writer = WeightsWriter(place, [TensorSpec("a_norm", "float32", (5,)), TensorSpec("b_norm", "float32", (7,))])
    writer.write("a_norm", 0, np.arange(5, dtype=np.float32))
    writer.write("b_norm", 0, np.arange(7, dtype=np.float32))
    writer.close()
    return Weights(place)


def listed(name: str, fmt: str, rows: int, columns: int) -> dict[str, dict]:
    """The manifest's entries for a matrix in the cpu's layout."""
    drawn = draws(fmt, columns)
    return {
        f"{name}/{p}": {"dtype": d, "shape": list(s), "draw": drawn[p]}
        for p, (s, d) in planes(fmt, rows, columns).items()
    }


@pytest.fixture(scope="module")
def artifacts(compiled, tmp_path_factory) -> tuple[Path, Path]:
    """The same model with weights and without."""
    without = tmp_path_factory.mktemp("model") / "without"
    with synthetic("tiny:q4_0") as model:
        compile_model(model, without, CompileOptions(target="cpu", ctx=64), weights=False)
    return compiled("tiny:q4_0", 64), without


@functools.cache
def decoder(fmt: str):
    return tvm.compile(dequantize(fmt, ROWS, K), target="llvm")["dequantize"]


@pytest.mark.parametrize("fmt", FORMATS)
def test_weights_have_the_deviation_of_a_model(vectors, fmt):
    weights = RandomWeights(vectors, listed("w", fmt, ROWS, K))
    out = np.frombuffer(mmap.mmap(-1, ROWS * K * 4), np.float32).reshape(ROWS, K)  # aligned
    decoder(fmt)(
        *(tvm.runtime.from_dlpack(weights[f"w/{plane}"]) for plane in planes(fmt, ROWS, K)),
        tvm.runtime.from_dlpack(out),
    )
    assert np.isfinite(out).all()
    assert out.std() * np.sqrt(K) == pytest.approx(1, rel=0.06)
    assert abs(out.mean()) * np.sqrt(K) < 0.05
    assert len({row.tobytes() for row in out}) == ROWS


def test_reads_make_the_block(vectors, monkeypatch):
    monkeypatch.setattr(random_weights, "BITS_LINES", 101)  # small patterns, so that matrices go around them
    monkeypatch.setattr(random_weights, "VALUE_LINES", 11)
    weights = RandomWeights(vectors, listed("a", "q4_k", 64, 256) | listed("b", "bf16", 32, 100))
    assert set(weights.places) == {"a_norm", "b_norm", "a/Q4", "a/D", "a/S", "a/Z", "a/DM", "b/W"}
    assert all(at % ALIGN == 0 for at, _ in weights.places.values())
    found = np.zeros(weights.total, np.uint8)
    for at in range(0, weights.total, 300):
        weights.read(at, found[at : at + 300])
    for name, (at, nbytes) in weights.places.items():
        assert weights[name].tobytes() == found[at : at + nbytes].tobytes()
    assert weights["b_norm"].tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert weights["a/S"].max() < 64 and (weights["a/DM"] == 0).sum() == 0
    ratio = weights["a/DM"].astype(float) / weights["a/D"]
    assert ratio == pytest.approx(7.5, rel=0.01)


def test_rows_of_a_large_matrix_do_not_repeat(vectors):
    """128k rows, as a vocabulary: two equal rows would be two equal logits."""
    weights = RandomWeights(vectors, listed("output", "q4_0", 131072, 1024))
    codes, scales = (weights[f"output/{plane}"] for plane in ("Q4", "D"))
    tiles = {codes[i, 0, :16].tobytes() + scales[i].tobytes() for i in range(len(codes))}
    assert len(tiles) == len(codes)


def test_a_weightless_artifact_is_small_and_runs(artifacts):
    with_weights, without = map(Artifact.open, artifacts)
    assert without.random_weights and not with_weights.random_weights
    assert set(without.weights.places) == set(with_weights.weights.places)
    assert without.manifest["weight_bytes"] == with_weights.manifest["weight_bytes"]
    size = without.manifest["files"]["weights.safetensors"]["bytes"]
    assert size < with_weights.manifest["files"]["weights.safetensors"]["bytes"] / 20
    for name in ("output_norm.weight", "rope.table"):
        assert np.array_equal(without.weights[name], with_weights.weights[name])
    engine, again = Engine.load(artifacts[1]), Engine.load(artifacts[1])
    logits = engine.prefill(range(60))
    assert np.isfinite(logits).all() and 0.2 < logits.std() < 5
    assert np.array_equal(logits, again.prefill(range(60)))


def test_every_artifact_says_how_to_draw_its_weights(artifacts):
    """So that its weights can be left out later."""
    first, second = (json.loads((path / "manifest.json").read_text()) for path in artifacts)
    assert (first["weights"], second["weights"]) == ("file", "random")
    assert first["tensors"] == second["tensors"]
    header = Artifact.open(artifacts[0]).weights.header
    for name, entry in first["tensors"].items():
        assert entry["shape"] == header[name]["shape"]
