"""A model whose layers are on several devices: Mesa's CPU driver, opened several times, and AMD's bindings' stand-in.
Every result must be the one of a single device."""

import threading
import time
from typing import Any

import numpy as np
import pytest
import vulkan_harness
from hip_model import KERNELS, artifact_in, check

from mlc_amd.runtime.artifact.artifact import Artifact
from mlc_amd.runtime.artifact.memory import nbytes, of_manifest
from mlc_amd.runtime.artifact.stages import most_stages, stages
from mlc_amd.runtime.cache.kv_pool import KvSize
from mlc_amd.runtime.devices import division
from mlc_amd.runtime.devices.division import GpuMemory, Placement
from mlc_amd.runtime.devices.hip.device import HipDevice
from mlc_amd.runtime.devices.staged import StagedDevice
from mlc_amd.runtime.devices.steps import write_private_pages, write_step
from mlc_amd.runtime.engine.engine import Engine
from mlc_amd.runtime.errors import MachineError, UsageError, UserError
from mlc_amd.runtime.options import RunOptions
from tests.dev.hip_recorder import Recorder

RNG = np.random.default_rng(3)
PROMPTS = [RNG.integers(0, 1000, count).tolist() for count in (5, 40, 90, 70, 30)]
SETTINGS = [{}, {"temperature": 0.8, "seed": 3}, {"repetition_penalty": 1.2}, {}, {"temperature": 1.0, "seed": 5}]
TWO = RunOptions(devices=(0, 0), kv_tokens=1024)


@pytest.fixture(scope="module", autouse=True)
def lavapipe():
    return vulkan_harness.gpu()


@pytest.fixture(scope="module")
def two(lavapipe_model):
    with Engine.load(lavapipe_model, TWO) as engine:
        yield engine


def answers(engine, limit):
    """To all prompts at once, each consumed by a thread of its own."""
    pairs = zip(PROMPTS, SETTINGS, strict=True)
    found = [engine.generate(prompt, max_tokens=limit, **changes) for prompt, changes in pairs]
    texts: list[list[int]] = [[] for _ in found]
    threads = [
        threading.Thread(target=lambda i=i, of=of: texts[i].extend(piece.id for piece in of))
        for i, of in enumerate(found)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return texts


@pytest.fixture(scope="module")
def expected(one):
    return answers(one, 4)


def free(engine):
    engine.reset()
    return all(pool.available == pool.pages for pool in engine.cache.pools.values())


def test_logits_are_those_of_one_device(one, two):
    assert len(two.device.stages) == 2 and two.device.kv_types == one.device.kv_types
    for engine in one, two:
        engine.reset()
    ids = PROMPTS[2]
    np.testing.assert_array_equal(one.prefill(ids), two.prefill(ids))
    for token in (7, 300, 11):
        np.testing.assert_array_equal(one.decode(token), two.decode(token))
    for engine in one, two:
        engine.reset()
    np.testing.assert_array_equal(one.score(ids), two.score(ids))


def test_answers_of_several_steps_at_once_are_those_of_one_device(expected, two, monkeypatch):
    started, start = [], two.device._start
    monkeypatch.setattr(two.device, "_start", lambda step: (started.append(len(two.device._steps)), start(step))[1])
    assert answers(two, 4) == expected
    assert max(started) >= 2  # steps that were in progress already
    assert free(two)


def test_sequences_that_advance_together(one, two):
    ids = np.array([prompt[:5] for prompt in PROMPTS])
    found = []
    for engine in one, two:
        with engine.batch(len(ids)) as batch:
            batch.prefill(ids)
            found.append(batch.decode([1, 2, 3, 4, 5], 6))
    assert found[0] == found[1]


def test_results_of_plain_runs_are_their_own(two):
    device, function = two.device, two.device.manifest["functions"]["decode"]
    write_private_pages(device, device.manifest)
    for token in (3, 4):
        found = []
        for run in device.run, device.run_plain:
            write_step(device, function, [(token, 0, 0)])
            run("decode")
            found.append((device.read("sampled", 1).tolist(), device.read("logits", 1).tolist()))
        assert found[0] == found[1]


def test_times_of_kernels_are_those_of_all_stages(one, two):
    kernels = [[kernel for kernel, *_ in engine.time([3])[2]] for engine in (one, two)]
    assert kernels[0] == kernels[1]


def test_probabilities(one, two):
    for engine in one, two:
        engine.reset()  # steps of other rows may have computed what is in the cache
    found = [
        [(piece.id, piece.logprob, piece.top) for piece in engine.generate(PROMPTS[0], max_tokens=8, logprobs=3)]
        for engine in (one, two)
    ]
    assert found[0] == found[1] and len(found[0][0][2]) == 3


def test_cancelled_answers_free_their_pages(two):
    draw = np.random.default_rng(1)
    for _ in range(2):
        found = [two.generate([*PROMPTS[0], i], max_tokens=4) for i in draw.integers(0, 1000, 12).tolist()]
        threads = [
            threading.Thread(target=consume, args=(of, int(count)))
            for of, count in zip(found, draw.integers(0, 6, len(found)), strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert free(two) and not two._loop.busy


def consume(answer, count):
    for _ in range(count):
        if next(answer, None) is None:
            return
    answer.close()


def test_a_stage_that_fails_ends_all_steps_with_one_error(lavapipe_model, monkeypatch):
    before = stage_threads()
    with Engine.load(lavapipe_model, TWO) as engine:
        engine.prefill(PROMPTS[0])

        def fail(function):
            raise MachineError("the second GPU was reset")

        monkeypatch.setattr(engine.device.stages[1], "begin", fail)
        with pytest.raises(MachineError, match="second GPU was reset"):
            list(engine.generate(PROMPTS[2], max_tokens=5))
        monkeypatch.undo()
        with pytest.raises(MachineError, match="load the model again"):
            engine.prefill([1, 2])
    with Engine.load(lavapipe_model, TWO) as engine:  # the threads serve the next device
        engine.prefill([1, 2])
    assert stage_threads() <= before + 2


@pytest.mark.parametrize("number", [0, 1])
def test_a_gpu_that_is_lost(lavapipe_model, number):
    with Engine.load(lavapipe_model, TWO) as engine:
        engine.prefill(PROMPTS[0])
        vulkan_harness.lose(engine.device.stages[number])
        with pytest.raises(MachineError, match=r"GPU 0, .*, was reset while .*load the model again") as found:
            list(engine.generate(PROMPTS[2], max_tokens=5))
        assert "\n" not in str(found.value)
        with pytest.raises(MachineError, match="load the model again"):
            engine.prefill([1, 2])
        device = engine.device
    assert not any(stage.close.alive for stage in device.stages)


def test_too_little_memory_on_the_second_gpu(lavapipe_model, monkeypatch):
    vulkan_harness.short_second(monkeypatch)
    with pytest.raises(UserError, match=r"GPU 0: out of GPU memory: .* are free"):
        Engine.load(lavapipe_model, TWO)


def stage_threads() -> int:
    return sum(thread.name == "mlc-amd opens" for thread in threading.enumerate())


def test_a_slow_stage_delays_and_changes_nothing(expected, two, monkeypatch):
    finished, begun = two.device.stages[1].finished, [0.0]

    def slow():
        begun[0] = begun[0] or time.perf_counter()
        if time.perf_counter() - begun[0] < 0.02 or not finished():
            return False
        begun[0] = 0.0
        return True

    monkeypatch.setattr(two.device.stages[1], "finished", slow)
    assert answers(two, 4) == expected


def test_a_stage_that_cannot_be_opened_releases_the_others(lavapipe_model, monkeypatch):
    opened, closed = [], []

    class Opened:
        name, kind, gpu, code_arch = "a", "vulkan", None, "x"

        def close(self):
            closed.append(self)

    def works():
        opened.append(Opened())
        return opened[-1]

    def fails():
        raise UserError("out of GPU memory")

    with pytest.raises(UserError, match="out of GPU memory"):
        StagedDevice(Artifact.open(lavapipe_model), [works, fails, works])
    assert set(closed) == set(opened) and len(opened) == 2


# ---- which GPUs


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": (0, 9)}, "no GPU 9 here"),
        ({"tensor_split": (1.0, 1.0, 1.0, 1.0, 1.0, 1.0)}, "has 6 numbers, and this machine"),
        ({"devices": (0, 0, 0)}, "only be divided between 2"),
        ({"devices": (0, 0), "device": "0"}, "give one of them"),
        ({"devices": (0, 0), "tensor_split": (1.0,)}, "1 numbers for 2 GPUs"),
        ({"devices": (0, 0), "tensor_split": (0.0, 0.0)}, "not all"),
    ],
    ids=str,
)
def test_what_cannot_be_divided(lavapipe_model, options, message):
    with pytest.raises((UserError, UsageError), match=message):
        Engine.load(lavapipe_model, RunOptions(**options))


def test_as_few_gpus_as_hold_the_model(lavapipe_model, monkeypatch):
    artifact = Artifact.open(lavapipe_model)
    size = of_manifest(artifact.manifest).device()
    for free, count in ((size, 0), (size - 1, 2), (1 << 10, 0)):
        gpus = [GpuMemory(i, f"GPU {i}", free) for i in range(4)]
        monkeypatch.setattr(division, "_of_kind", lambda manifest, several, gpus=gpus: iter(gpus))
        assert len(division.find(artifact, Placement())) == count


def test_no_stage_has_only_the_layer_that_guesses_tokens():
    def function(*layers):
        return {"launches": [{"kernel": "k", "args": [["weight", f"blk.{layer}.w"]]} for layer in layers]}

    functions = {"decode": function(0, 1), "follow_decode": function(2)}
    manifest: Any = {"functions": functions, "kernels": [{"name": "k", "params": [{"role": "weight"}]}]}
    assert most_stages(manifest) == 2


def test_the_cache_is_divided_with_the_layers(lavapipe_model):
    artifact = Artifact.open(lavapipe_model)
    found = stages(artifact.manifest, [1], {name: count for name, (_, count) in artifact.weights.places.items()})
    sizes = [division.cache_size(KvSize(memory=1 << 20), stage, artifact).memory or 0 for stage in found]
    own = sum(nbytes(entry) for entry in artifact.manifest["kv"] if "span" not in entry)  # each has these
    assert sizes[0] == sizes[1] and 0 <= (1 << 20) + own - sum(sizes) < 2
    assert division.cache_size(KvSize(tokens=640), found[0], artifact) == KvSize(tokens=640)


# ---- HIP


def test_steps_cross_between_hip_devices(tmp_path):
    artifact = artifact_in(tmp_path)("gfx1100")
    roles = {
        "embed": ("state", "input", "weight", "output"),
        "mix": ("state", "rows", "pages", "input", "cache", "output"),
        "last": ("input", "weight", "output", "state"),
        "all": ("input", "weight", "output", "state"),
        "pick": ("state", "input", "input", "input", "output"),
    }
    for entry in artifact.manifest["kernels"]:
        entry["params"] = [{"role": role} for role in roles[entry["name"]]]
    sizes = {name: count for name, (_, count) in artifact.weights.places.items()}
    found = stages(artifact.manifest, [0], sizes)
    recorders = [Recorder(KERNELS), Recorder(KERNELS)]

    def opener(stage, bindings):
        return lambda: HipDevice(stage.of(artifact), bindings=bindings)

    device = StagedDevice(artifact, [opener(*pair) for pair in zip(found, recorders, strict=True)])
    check(device)
    assert {symbol for symbol, *_ in recorders[0].launched} == {"embed_k", "mix_k", "mix_k_1"}
    assert "embed_k" not in {symbol for symbol, *_ in recorders[1].launched}
    device.close()


@pytest.mark.full
@pytest.mark.parametrize("name", ["deepseek4", "glm-dsa", "hy_v4", "kimi-k3", "qwen4exp", "talkie"])
def test_what_later_layers_read_crosses(compiled_for, name):
    """The keys that a layer chose for others (glm-dsa), the rows before the first layer (talkie), several streams
    (deepseek4, hy_v4, qwen4exp), what the stream was before (kimi-k3)."""
    path, ids = compiled_for("vulkan", "lavapipe", (name,), 128, few=True), PROMPTS[1]
    with Engine.load(path) as one, Engine.load(path, RunOptions(devices=(0, 0), kv_tokens=1024)) as two:
        assert len(two.device.stages) == 2
        np.testing.assert_array_equal(one.prefill(ids), two.prefill(ids))
        np.testing.assert_array_equal(one.decode(7), two.decode(7))
