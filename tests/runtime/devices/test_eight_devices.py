"""Eight devices, as many as a model can be divided between: Mesa's CPU driver, opened eight times, by both splits."""

import numpy as np
import pytest
import vulkan_harness
from few_functions import few_functions

from mlc_amd.compiler.gguf.synthetic import synthetic
from mlc_amd.compiler.pipeline import compile_model
from mlc_amd.runtime.devices.tensor import TensorDevice
from mlc_amd.runtime.engine.engine import Engine
from mlc_amd.runtime.options import CompileOptions, RunOptions

KEYS = {"attention.head_count": 8, "attention.head_count_kv": 8, "feed_forward_length": 512}
LAYERS = {"layer": 8, "tensor": 2}
MOST = {"layer": 0, "tensor": 1e-4}  # KL divergence from one device
SPLITS = {"layer": CompileOptions(), "tensor": CompileOptions(split="tensor", gpus=8)}


@pytest.fixture(scope="module", autouse=True)
def lavapipe():
    return vulkan_harness.gpu()


def logits(folder, devices):
    """Of four tokens, and the pages that are free at the end, as a share."""
    with Engine.load(folder, RunOptions(devices=(0,) * devices, kv_tokens=256)) as engine:
        assert len(getattr(engine.device, "stages", [engine.device])) == devices
        if isinstance(engine.device, TensorDevice):
            vulkan_harness.run_one_by_one(engine.device, ["decode"])
        found = [engine.decode(token).copy() for token in (7, 300, 11, 5)]  # eight devices compile what they run
        engine.reset()
        return np.array(found), {pool.available / pool.pages for pool in engine.cache.pools.values()}


@pytest.mark.parametrize("split", SPLITS)
def test_logits_are_those_of_one_device(tmp_path, split):
    model, options = synthetic("tiny:q4_0", keys=KEYS | {"block_count": LAYERS[split]}), SPLITS[split]
    with few_functions():
        for name, of in {"one": CompileOptions(), "eight": options}.items():
            given = {"target": "vulkan", "arch": "lavapipe", "ctx": 128, "tuned": "none"}
            compile_model(model, tmp_path / name, CompileOptions(**given, split=of.split, gpus=of.gpus))
    (exact, _), (found, free) = (logits(tmp_path / name, count) for name, count in (("one", 1), ("eight", 8)))
    p, q = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (exact.astype(float), found.astype(float)))
    assert float((np.exp(p) * (p - q)).sum(-1).mean()) <= MOST[split]
    assert free == {1}
