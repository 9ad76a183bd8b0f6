"""The vulkan target from GGUF to text, on the Vulkan device that is here (Mesa's CPU driver in CI)."""

import numpy as np
import pytest
import reference
import vulkan_harness
from samples import sample

from mlc_amd.compiler.gguf import synthetic
from mlc_amd.runtime.artifact.artifact import Artifact
from mlc_amd.runtime.devices.opening import open_device
from mlc_amd.runtime.devices.steps import write_private_pages, write_step
from mlc_amd.runtime.engine.engine import Engine
from mlc_amd.runtime.errors import UserError
from tests.dev.quality import Reference, kl_divergence

MAX_KL = 1e-3
# of the reference models: Mesa takes half a minute to compile one; all of them: tests.dev.vulkan_quality
SAMPLE = "qwen3-q4_0"


@pytest.fixture
def made(compiled_for):
    """made(GGUF path or synthetic spec, arch, ctx) -> artifact folder, compiled once, with few functions."""
    return lambda source, arch, ctx=64: compiled_for("vulkan", arch, source, ctx, few=True)


@pytest.fixture
def load():
    """load(artifact folder) -> Engine; closes its device after the test."""
    vulkan_harness.gpu()  # skips without a device
    opened = []

    def open_engine(path):
        opened.append(Engine.load(path))
        return opened[-1]

    yield open_engine
    for engine in opened:
        engine.device.close()


@pytest.mark.parametrize(
    ("spec", "arch"),
    sample(
        [("tiny:q4_k", "vangogh"), ("tiny-qwen3:q6_k", "rdna4"), ("tiny-qwen2:q5_1", "generic")],
        [("tiny-qwen3:q6_k", "rdna4")],
    ),
)
def test_artifact(made, spec, arch):
    """Five dispatches a layer in decode; every launch says where its code is and what it writes."""
    manifest = Artifact.open(made(spec, arch)).manifest
    decode, launches = manifest["functions"]["decode"]["launches"], manifest["launches"][arch]
    assert len(decode) == 5 * len(manifest["model"]["layers"]) + 3
    assert manifest["target"]["archs"] == [arch]
    size = manifest["files"][manifest["libraries"][arch]]["bytes"]
    for call in decode:
        steps = launches[call["kernel"]]["steps"]
        assert len(steps) == 1 or call["kernel"].startswith("sample")
        for step in steps:
            assert sum(step["code"]) <= size and step["writes"]
            assert (
                len(step["args"]) <= 16 or step["table"] or manifest["target"]["needs"][arch]["push_constants"] == 256
            )


SEVERAL = "7900xtx:matrix=none,lavapipe,generic"


def test_several_profiles_share_an_artifact(made):
    manifest = Artifact.open(made("tiny:q4_0", SEVERAL, 128)).manifest
    assert list(manifest["libraries"].values()) == [
        "kernels-rdna3-matrix-none.spv",
        "kernels-lavapipe.spv",
        "kernels-generic.spv",
    ]
    with pytest.raises(UserError, match="need different layouts"):
        made("tiny:q4_0", "steamdeck,rdna3")


def test_a_device_takes_the_first_profile_that_fits(made):
    """With the function of one token only: a driver compiles all that an artifact has."""
    vulkan_harness.gpu()
    artifact = Artifact.open(made("tiny:q4_0", SEVERAL, 128))
    functions = artifact.manifest["functions"]
    artifact.manifest["functions"] = {"decode": functions["decode"]}
    device = open_device(artifact)
    write_private_pages(device, artifact.manifest)
    write_step(device, functions["decode"], [(1, 0, 0)])
    device.run("decode")
    assert device.code_arch == "lavapipe" and np.isfinite(device.read("logits", 1)).all()
    device.close()


def test_unknown_profile(made):
    with pytest.raises(UserError, match="unknown Vulkan profile 'voodoo2'"):
        made("tiny:q4_0", "voodoo2")


@pytest.mark.full  # test_vulkan_device.py compares a model with the CPU's in every run, test_memory.py runs experts
@pytest.mark.parametrize(("spec", "arch"), [("tiny-qwen3:mxfp4", "auto"), ("tiny-qwen2:q4_0", "generic")])
def test_logits(made, load, spec, arch):
    """A prefill chunk, decode steps, and the logits of a whole text, against the numpy reference."""
    vulkan_harness.gpu()
    engine, ids = load(made(spec, arch)), np.random.default_rng(7).integers(0, 1024, 24)
    logits = [engine.prefill(ids[:20]), *(engine.decode(int(i)) for i in ids[20:])]
    exact = reference.forward(synthetic(spec), ids)
    assert kl_divergence(exact[19:], np.stack(logits)) < MAX_KL
    engine.reset()
    assert kl_divergence(exact, engine.score(ids)) < MAX_KL
    assert arch in ("auto", engine.device.code_arch)


@pytest.mark.full
def test_quality(made, load, shared):
    vulkan_harness.gpu()
    engine, expected = load(made(shared / "models" / f"{SAMPLE}.gguf", "auto", 512)), Reference(shared, SAMPLE)
    found = expected.logits(engine)
    assert found.good, found
    compared, wrong = expected.greedy(engine, 8)
    assert compared and not wrong
