"""The vulkan device on Mesa's CPU driver: a model against the cpu device, memory, caches, errors.

Nothing of ours is replaced; where a test needs hardware that is not here (memory of its own, a reset), the driver's
answer is changed. The bundled model's weights are compared with the cpu device's results; all else runs a small model,
whose kernels the driver compiles once.
"""

import hashlib
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import vulkan_harness

from mlc_amd.compiler.gguf import GGUFModel, synthetic
from mlc_amd.compiler.pipeline import compile_model
from mlc_amd.runtime.artifact.artifact import Artifact
from mlc_amd.runtime.cache.cache_types import kv_bytes
from mlc_amd.runtime.cache.pages import PAGE
from mlc_amd.runtime.devices.opening import open_device
from mlc_amd.runtime.devices.vulkan import api, device, pipelines
from mlc_amd.runtime.devices.vulkan.device import VulkanDevice
from mlc_amd.runtime.devices.vulkan.memory import VulkanMemory
from mlc_amd.runtime.engine.engine import Engine
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.options import CompileOptions, RunOptions
from mlc_amd.schedules.gpu.base import profiles
from tests.dev.fuzz import resealing
from tests.dev.quality import TIE

CTX = 128
SMALL = "tiny:q4_0"


@pytest.fixture(scope="module", autouse=True)
def lavapipe():
    return vulkan_harness.gpu()


def compiled_to(folder: Path, source: Path | str, **options) -> Path:
    """A GGUF file or a synthetic spec -> its artifact for the profile that Mesa's CPU driver gets."""
    with synthetic(source) if isinstance(source, str) else GGUFModel.open(source) as model:
        compile_model(model, folder, CompileOptions(target="vulkan", arch="lavapipe", ctx=CTX), **options)
    return folder


@pytest.fixture(scope="module")
def artifact(compiled_for) -> Path:
    """With few functions: the driver prepares the kernels of all whenever a device is opened, which takes longer than
    most tests."""
    return compiled_for("vulkan", "lavapipe", SMALL, CTX, few=True)


@pytest.fixture(scope="module")
def plain(artifact) -> np.ndarray:
    """The small model's logits when nothing is out of the ordinary."""
    return logits(Engine.load(artifact), IDS)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("MLC_AMD_DEVICE", raising=False)


def changed(artifact: Path, to: Path, change) -> Path:
    """A copy of an artifact with another manifest."""
    shutil.copytree(artifact, to)
    manifest = resealing.content(to)
    change(manifest)
    resealing.reseal(to, manifest, interfaces=True)
    return to


def logits(engine, ids) -> np.ndarray:
    engine.reset()
    return engine.score(ids)


IDS = [3, 17, 200, 5, 9, 41, 8, 77, 100, 2, 64, 30, 11, 250, 19, 6, 1]


# ---- models


def near(got: np.ndarray, expected: np.ndarray) -> bool:
    """Activations are rounded to 8 bits in both, in other groups."""
    return np.linalg.norm(got - expected) < 0.03 * np.linalg.norm(expected)


@pytest.mark.parametrize("which", ["small", pytest.param("bundled", marks=pytest.mark.full)])
def test_a_model_computes_what_it_does_on_the_cpu(which, compiled_for, demo_gguf, compiled):
    """Logits of a text, at once and token by token; then greedy text: both get the CPU's tokens, and agree on each
    unless it is a tie. The driver compiles the bundled model's kernels for a minute."""
    source = demo_gguf if which == "bundled" else SMALL
    cpu, vulkan = (
        Engine.load(compiled(source, 64)),
        Engine.load(compiled_for("vulkan", "lavapipe", source, CTX, few=True)),
    )
    assert vulkan.device.code_arch == "lavapipe"
    expected = logits(cpu, IDS)
    assert near(logits(vulkan, IDS), expected)
    vulkan.reset()
    for i, token in enumerate(IDS):
        assert near(vulkan.decode(token), expected[i])
    cpu.reset(), vulkan.reset()
    ids = cpu.tokenizer.encode("os.path.join: Join two or more")
    left, right, compared = cpu.prefill(ids), vulkan.prefill(ids), 0
    for _ in range(10):
        second, first = np.sort(left)[-2:]
        if first - second >= TIE:
            assert left.argmax() == right.argmax()
            compared += 1
        token = int(left.argmax())
        left, right = cpu.decode(token), vulkan.decode(token)
    assert compared > 4
    vulkan.device.close()


def test_replays_give_the_same_bits_and_the_cache_can_be_cleared(artifact):
    engine = Engine.load(artifact)
    first = engine.prefill(IDS).tobytes()
    for _ in range(3):
        engine.truncate(0)
        assert engine.prefill(IDS).tobytes() == first
    engine.device.clear()
    engine.truncate(1)  # what the cache held at the first place is gone
    assert engine.prefill(IDS[1:]).tobytes() != first


def test_a_gpu_with_memory_of_its_own_gets_weights_through_staging(artifact, plain, monkeypatch):
    monkeypatch.setattr(device, "choose", lambda gpus, *rest: (replace(gpus[0], type="discrete"), "lavapipe"))
    monkeypatch.setattr("mlc_amd.runtime.devices.placement.CHUNK", 100_000)  # many pieces
    engine = Engine.load(artifact)
    assert all(block.host is None for block, _ in engine.device._weights.values())
    assert np.array_equal(logits(engine, IDS), plain)


def test_inputs_are_copied_where_the_host_cannot_reach_the_gpus_memory(lavapipe_model, plain, monkeypatch):
    monkeypatch.setattr(device, "choose", lambda gpus, *rest: (replace(gpus[0], type="discrete"), "lavapipe"))
    block = VulkanMemory.block

    def across_the_bus(self, nbytes, kind):
        made = block(self, nbytes, kind)
        return replace(made, flags=made.flags & ~api.DEVICE_LOCAL) if kind == "input" else made

    monkeypatch.setattr(VulkanMemory, "block", across_the_bus)
    engine = Engine.load(lavapipe_model)
    assert engine.device.io.copies
    assert np.array_equal(logits(engine, IDS), plain)
    found = [masked(one) for one in (engine, Engine.load(lavapipe_model), engine)]
    assert found[0] == found[1] == found[2]


def masked(engine: Engine) -> list[int]:
    """Tokens of two answers together, of which every step may choose others."""

    def constraint() -> SimpleNamespace:
        rng = np.random.default_rng(4)
        words = -(-engine.vocab // 32)
        masks = lambda: rng.integers(-(1 << 31), 1 << 31, words, np.int32)  # noqa: E731
        return SimpleNamespace(allowed=masks, accept=lambda token: None, complete=False)

    pieces = engine.generate([IDS, IDS[3:]], max_tokens=6, constraint=constraint, repetition_penalty=1.2)
    return [piece.id for piece in sorted(pieces, key=lambda piece: piece.index)]


def test_weights_in_several_blocks(artifact, plain, monkeypatch):
    size = 300_000  # more than the io buffers have
    monkeypatch.setattr(device, "BLOCK", size)
    monkeypatch.setattr("mlc_amd.runtime.devices.vulkan.memory.BLOCK", size)
    engine = Engine.load(artifact)
    assert len(engine.device._weights) > 3
    assert np.array_equal(logits(engine, IDS), plain)


@pytest.mark.full  # test_measure_devices.py runs a kernel with one
def test_tables_of_addresses(plain, tmp_path):
    """Kernels with more arguments than push constants hold get a table: here one address less fits than the largest
    kernel has."""
    profile = replace(profiles.resolve("lavapipe"), name="lavapipe", push=40)
    assert profile.arguments == 5
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(profiles.PROFILES, "lavapipe", profile)
        compiled_to(tmp_path / "tables", SMALL)
    steps = [
        s
        for kernel in Artifact.open(tmp_path / "tables").manifest["launches"]["lavapipe"].values()
        for s in kernel["steps"]
    ]
    assert {step["table"] for step in steps} == {True, False}
    assert np.array_equal(logits(Engine.load(tmp_path / "tables"), IDS), plain)


def test_times_of_kernels(artifact):
    engine = Engine.load(artifact)
    engine.prefill(IDS)
    plan = [call["kernel"] for call in engine.artifact.manifest["functions"]["decode"]["launches"]]
    for _ in range(2):
        begin = time.perf_counter()
        function, count, times = engine.time([5])
        assert (function, count) == ("decode", 1)
        assert list(dict.fromkeys(name for name, _, _ in times)) == list(dict.fromkeys(plan))
        spent = time.perf_counter() - begin
        assert all(seconds >= 0 and gap >= 0 for _, seconds, gap in times)
        assert 0 < sum(seconds + gap for _, seconds, gap in times) < 1.1 * spent
    assert engine.device.copy_bandwidth() > 0
    assert engine.device.waited > 0


def test_nothing_grows(artifact):
    """Neither host memory nor files nor positions leak over a hundred steps."""
    engine = Engine.load(artifact)

    def run(times):
        for i in range(times):
            if engine.position == engine.context:
                engine.reset()
            engine.decode(i)
        return vulkan_harness.resident()

    before, files = run(30), len(os.listdir("/proc/self/fd"))
    assert run(100) - before < 512  # KiB
    for _ in range(30):
        engine.truncate(0)
        engine.decode(5)
    assert run(1) - before < 512
    assert len(os.listdir("/proc/self/fd")) == files


def test_the_device_argument(artifact, compiled):
    assert open_device(Artifact.open(artifact), "0").gpu.index == 0
    assert open_device(Artifact.open(artifact), "vulkan").kind == "vulkan"
    with pytest.raises(UserError, match="--device GeForce"):
        open_device(Artifact.open(artifact), "GeForce")
    with pytest.raises(UserError, match="for target 'vulkan', not 'cpu'; compile it with --target cpu"):
        open_device(Artifact.open(artifact), "cpu")
    with pytest.raises(
        UserError, match="for target 'cpu', not '0'; compile it with --target rocm or vulkan to choose a GPU"
    ):
        open_device(Artifact.open(compiled(SMALL, 64)), "0")


def test_long_steps_are_submitted_in_pieces(artifact, plain, monkeypatch):
    """As many submissions as needed, some of them of parts of a launch, and the same bits. A short step is one."""
    engine = Engine.load(artifact)
    device, submitted = engine.device, []
    enqueue = device.context.enqueue_together
    monkeypatch.setattr(device.context, "enqueue_together", lambda parts: submitted.append(parts) or enqueue(parts))

    def counted() -> int:
        submitted.clear()
        assert np.array_equal(logits(engine, IDS), plain)
        return len(submitted)

    assert counted() == 1
    launches = sum(len(device._kernels[call["kernel"]]["steps"]) for call in functions(engine)["score_64"]["launches"])
    device.pacer.limit = 2e-5  # seconds, of a step that takes some milliseconds
    counted()  # after which the estimate is this machine's
    assert counted() > launches
    pieces = device.pacer.pieces("score_64")
    assert counted() == len(pieces) and any(not part.whole for piece in pieces for part in piece)
    function, _, times = engine.time(IDS)
    assert [name for name, *_ in times] == [
        call["kernel"]
        for call in functions(engine)[function]["launches"]
        for _ in device._kernels[call["kernel"]]["steps"]
    ]
    device.run_plain(function)
    assert len(submitted) > 2 * launches  # in pieces, too
    device.pacer.limit = 10.0
    assert counted() == 1


def test_how_large_the_cache_is(lavapipe_model, plain, monkeypatch, caplog):
    """As many tokens as a step's 64 sequences can use, where the device has room; no tensor is larger than the driver
    allows."""
    engine = Engine.load(lavapipe_model, RunOptions(kv_memory="auto"))
    assert engine.device.kv_types["k.0"][0][0] == 64 * CTX // PAGE
    assert np.array_equal(logits(engine, IDS), plain)
    limit = 8 << 20
    limits = dict.fromkeys(("allocation", "buffer"), limit)
    small = lambda gpus, *rest: (replace(gpus[0], limits=gpus[0].limits | limits), "lavapipe")  # noqa: E731
    monkeypatch.setattr(device, "choose", small)
    engine = Engine.load(lavapipe_model, RunOptions(kv_tokens=1 << 20))
    sizes = [kv_bytes({name: of}) for name, of in engine.device.kv_types.items() if name[0] in "kv"]
    assert limit // 2 < max(sizes) <= limit and "this driver allows 8 MiB for one tensor" in caplog.text
    assert np.array_equal(logits(engine, IDS), plain)


def functions(engine) -> dict:
    return engine.artifact.manifest["functions"]


@pytest.mark.full
def test_random_weights(tmp_path):
    found = logits(Engine.load(compiled_to(tmp_path / "model", SMALL, weights=False)), IDS)
    assert np.isfinite(found).all() and found.std() > 0


# ---- errors


def test_out_of_memory(artifact, tmp_path, lavapipe):
    def large(manifest):
        manifest["kv"] += [
            {"name": f"more.{i}", "dtype": "uint8", "shape": [1 << 30]} for i in range(lavapipe.heaps[0].size >> 30)
        ]

    def one_piece(manifest):
        manifest["arena_bytes"] = lavapipe.limits["allocation"] + 1024

    with pytest.raises(
        UserError, match=r"out of GPU memory: this model needs .* GiB .*KV cache .* GiB at --ctx 128.* are free; "
    ):
        VulkanDevice(Artifact.open(changed(artifact, tmp_path / "large", large)))
    with pytest.raises(UserError, match=r"GiB in one piece, and .* at most; compile with a smaller --ctx"):
        VulkanDevice(Artifact.open(changed(artifact, tmp_path / "piece", one_piece)))
    assert VulkanDevice(Artifact.open(artifact)).name  # nothing of it stays


def test_a_lost_device_closes_and_another_can_be_opened(artifact):
    one = VulkanDevice(Artifact.open(artifact))
    vulkan_harness.lose(one)
    with pytest.raises(
        UserError,
        match=r"GPU \d, .* reset while running decode \(vkQueueSubmit failed: VK_ERROR_DEVICE_LOST\).*load the model",
    ):
        one.run("decode")
    assert not one.close.alive
    for call in (lambda: one.run("decode"), lambda: one.read("logits", 1), lambda: one.write("tokens", [1]), one.clear):
        with pytest.raises(UserError, match="this device is closed"):
            call()
    VulkanDevice(Artifact.open(artifact)).run("decode")


def test_a_launch_that_is_too_large(artifact):
    one = VulkanDevice(Artifact.open(artifact))
    name, kernel = next(iter(one.manifest["launches"]["lavapipe"].items()))
    with pytest.raises(
        UserError, match=rf"cannot launch 70000x1x1 workgroups, as {name} needs; compile the model for another --arch"
    ):
        one._launch(name, kernel["steps"][0] | {"grid": [70000, 1, 1]}, [])


def test_damaged_code_is_not_given_to_the_driver(artifact, tmp_path):
    damaged = tmp_path / "damaged"
    shutil.copytree(artifact, damaged)
    one = Artifact.open(damaged)
    file = damaged / one.manifest["libraries"]["lavapipe"]
    file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(UserError, match=r"corrupted \(checksum differs\); compile the model again"):
        Artifact.open(damaged)


# ---- the pipelines' cache


def test_pipeline_cache(artifact, lavapipe, tmp_path, monkeypatch):
    file = pipelines.cache_file(lavapipe)
    assert file.is_relative_to(tmp_path)
    expected = logits(Engine.load(artifact), IDS)
    content = file.read_bytes()
    assert [path.name for path in file.parent.iterdir()] == [file.name]  # nothing temporary stays
    for damaged in (b"", content[:-1] + b"x"):
        file.write_bytes(damaged)
        assert np.array_equal(logits(Engine.load(artifact), IDS), expected)
        again = file.read_bytes()
        assert hashlib.sha256(again[pipelines.DIGEST :]).digest() == again[: pipelines.DIGEST] != b""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))  # no folder can be made there
    assert np.array_equal(logits(Engine.load(artifact), IDS), expected)
