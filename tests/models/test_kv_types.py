"""Types of the KV cache: what the command line understands, the memory that they need, and a whole model with a
quantized cache against numpy. (Kernels: test_cpu_attention.py, test_gpu_attention.py, test_vulkan_rows.py.)"""

import json
import re

import numpy as np
import pytest
from architectures import tiny
from samples import sample
from vulkan_harness import gpu

from mlc_amd.compiler import memory
from mlc_amd.compiler.codegen.target import make_target
from mlc_amd.compiler.gguf.synthetic import synthetic
from mlc_amd.compiler.pipeline import compile_model
from mlc_amd.runtime.artifact.artifact import Artifact
from mlc_amd.runtime.cache.kv_types import CODES
from mlc_amd.runtime.devices.opening import open_device
from mlc_amd.runtime.engine.engine import Engine
from mlc_amd.runtime.errors import UsageError, UserError
from mlc_amd.runtime.options import CompileOptions, LoadOptions
from mlc_amd.schedules.operators.attention import KV_BLOCK
from mlc_amd.tools import arguments, cli
from mlc_amd.tools.checks import selftest_kernels, selftest_model
from mlc_amd.tools.commands import chat
from mlc_amd.tools.hub import models
from mlc_amd.tools.hub.model_cache import Recipe
from mlc_amd.tools.reference.attention import as_stored, quantized
from tests.dev.quality import kl_divergence
from tests.models.cpu_ranks import CpuRanks

CTX = 128


# ---- the command line


@pytest.mark.parametrize(
    ("tokens", "kv"),
    [
        (["-ctk", "q8_0", "-ctv", "q8_0"], "q8_0"),
        (["--cache-type-v=q4_0", "--cache-type-k=q4_0"], "q4_0"),
        (["-ctv", "q4_0", "-ctk", "q8_0"], "q8_0/q4_0"),
    ],
)
def test_names_of_llama_cpp(tokens, kv):
    assert arguments.normalize(chat.run, {}, tokens) == [f"--kv_type={kv}"]


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (["-ctk", "q8_0"], "keys q8_0: no such type of keys and values; write --kv-type and one of f16, q8_0, q4_0"),
        (["-ctk", "q8_0", "-ctv", "f16"], "keys q8_0 and values f16: no such type of keys and values"),
        (["-ctk", "q8_0", "--cache-type-k", "q8_0"], "--cache-type-k is given twice"),
        (["-ctk", "q8_0", "-ctv", "q8_0", "--kv-type", "f16"], "--kv-type is given twice"),
    ],
)
def test_other_types_of_keys_and_values_are_refused(tokens, message):
    with pytest.raises(UsageError, match=message):
        arguments.normalize(chat.run, {}, tokens)


def test_unknown_types_are_refused(capsys):
    assert cli.main(["chat", "-ctk", "q5_0", "-ctv", "q5_0"]) == 2
    assert "--kv-type must be f16, q8_0, q4_0 or q8_0/q4_0, not 'q5_0'" in capsys.readouterr().err
    with pytest.raises(UserError, match="unknown type 'q5_0' of the KV cache; known: f16, q8_0"):
        make_target("cpu", "x86-64-v3", "q5_0")


def test_a_model_is_cached_for_each_type():
    made = [
        Recipe(path=None, synthetic="tiny:q4_0", target="cpu", arch="x86-64-v3", ctx=64, tuned="none", kv_type=kv_type)
        for kv_type in ("f16", "q8_0")
    ]
    assert made[0].key != made[1].key


# ---- memory


@pytest.mark.parametrize(("target", "arch"), [("cpu", "x86-64-v3"), ("rocm", "gfx1100")])
@pytest.mark.parametrize(("kv", "size"), [("q8_0", 68 << 10), ("q4_0", 36 << 10), ("q8_0/q4_0", 52 << 10)])
def test_a_quantized_cache_needs_less_memory(target, arch, kv, size):
    """Of Llama 3 8B 8.5 or 4.5 bits for each of 2 * 32 * 1024 elements of a token, and its angles."""
    with synthetic("llama3-8b:q4_0") as model:
        needs = memory.needs(model, make_target(target, arch, kv), 4096)
    assert needs.token == size + 4 * 128
    assert needs.kv == pytest.approx(4096 * size, rel=0.1)  # on GPUs also what splits join through


@pytest.mark.parametrize(("target", "arch"), [("cpu", "x86-64-v3"), ("vulkan", "lavapipe")])
def test_heads_of_other_sizes_are_refused(tmp_path, target, arch):
    with (
        tiny("gemma3") as model,
        pytest.raises(UserError, match="--kv-type q8_0 needs heads in multiples of 32, not of"),
    ):
        compile_model(model, tmp_path / "model", CompileOptions(target=target, arch=arch, ctx=64, kv_type="q8_0"))
    assert not (tmp_path / "model").exists()


# ---- numbers


def test_elements_are_rounded_to_steps_of_their_block():
    """Those of 4 bits up to seven steps, and on the side of the largest one eight."""
    y = np.random.default_rng(1).standard_normal((500, KV_BLOCK))
    codes, scales = quantized(y, CODES["q4_0"])
    largest = np.take_along_axis(y, np.abs(y).argmax(-1)[:, None], -1)
    assert (codes.min(-1) == -8).all() and codes.max() == 7
    np.testing.assert_allclose(scales, largest / -8, rtol=0.1)  # fitted to the codes
    step = np.abs(largest) / 8
    assert (np.where(codes == 7, 0, np.abs(codes * largest / -8 - y)) <= 0.51 * step).all()
    left = as_stored(y, CODES["q4_0"]) - y
    assert (left**2).sum() < ((codes * largest / -8 - y) ** 2).sum()
    x = np.random.default_rng(0).standard_normal((5, 2 * KV_BLOCK)) * np.array([1, 1e-7, 1e4, 1e6, 0])[:, None]
    codes, scales = quantized(x)
    assert np.abs(codes).max() == 127 and np.isfinite(scales).all()
    step = np.abs(x).reshape(5, 2, -1).max(-1) / 127
    apart = np.abs(as_stored(x) - x).reshape(5, 2, -1).max(-1)
    assert (apart[[0, 2, 3, 4]] <= 0.56 * step[[0, 2, 3, 4]]).all()  # half a step, and the scale's own rounding
    assert (apart[1] <= 2.0**-25 * 128).all()  # where the scale is one of the smallest float16


# On vulkan, test_vulkan_rows.py has the kernels of such caches in every run.
@pytest.mark.parametrize(
    ("target", "arch", "kv"),
    sample(
        [(*of, kv) for of in (("cpu", "native"), ("vulkan", "lavapipe")) for kv in ("q8_0", "q4_0", "q8_0/q4_0")],
        [("cpu", "native", "q4_0")],
    ),
)
def test_a_model_computes_what_numpy_does(compiled_for, target, arch, kv):
    if target == "vulkan":
        gpu("llvmpipe")
    made = Artifact.open(compiled_for(target, arch, "tiny:f16", CTX, kv))
    types = {entry["name"][0]: entry["dtype"] for entry in made.manifest["kv"] if entry["name"][1] == "."}
    wanted = ("int8" if kv[:2] == "q8" else "uint8"), ("uint8" if "q4" in kv else "int8")
    assert (types["k"], types["v"]) == wanted and made.manifest["kv_type"] == kv
    code = made.manifest["target"]["arch"]
    found = list(selftest_kernels.check_all(made, code, "2" if target == "cpu" else None, runs=0))
    assert [one for one in found if one["problem"]] == []
    device = open_device(made)
    try:
        assert selftest_model.logits(device, made)["problem"] is None
    finally:
        device.close()


def test_an_artifact_has_its_type(compiled_for, capsys):
    made = compiled_for("cpu", "native", "tiny:f16", CTX, "q8_0")
    assert cli.main(["inspect", str(made), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kv_type"] == "q8_0"
    with pytest.raises(UserError, match=r"--kv-type f16: .* was compiled with --kv-type q8_0"):
        models.load_engine(LoadOptions(model=str(made), kv_type="f16"))
    assert models.artifact_path(LoadOptions(model=str(made), kv_type="q8_0")) == made


def test_latents_have_8_bits(tmp_path, capsys):
    """As they are few, and keys and values in one."""
    out = tmp_path / "model"
    with tiny("deepseek2") as model:
        compile_model(model, out, CompileOptions(target="cpu", ctx=64, kv_type="q4_0", tuned="none"))
    made = Artifact.open(out)
    caches = {entry["name"]: entry["dtype"] for entry in made.manifest["kv"] if "span" in entry}
    assert caches["k.0"] == "int8" and caches["ks.0"] == "float16" and "v.0" not in caches
    found = selftest_kernels.check_all(made, made.manifest["target"]["arch"], "2", runs=0)
    assert [one for one in found if one["problem"]] == []
    assert cli.main(["inspect", str(out)]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"KV type +q4_0\n", shown) and re.search(r"latents +q8_0\n", shown)


def test_gpus_that_share_a_model_have_the_caches_of_one(tmp_path, compiled_for):
    """Each has whole heads. Sums come in another order."""
    out, ids = tmp_path / "model", np.random.default_rng(0).integers(0, 1000, 100)
    with synthetic("tiny:f16") as model:
        options = CompileOptions(target="cpu", ctx=CTX, split="tensor", gpus=2, kv_type="q4_0", tuned="none")
        compile_model(model, out, options)
    divided = Artifact.open(out)
    with Engine.load(compiled_for("cpu", "native", "tiny:f16", CTX, "q4_0")) as one:
        whole = one.score(ids)
    with Engine(divided, CpuRanks(divided)) as engine:
        assert kl_divergence(whole, engine.score(ids)) < 1e-4
