"""A model of which several devices compute a part of every product: Mesa's CPU driver, opened several times. Results
are those of one device but for the order of sums."""

import threading
import time

import architectures
import numpy as np
import pytest
import vulkan_harness
from few_functions import few_functions
from samples import sample

from mlc_amd.compiler.gguf.synthetic import synthetic
from mlc_amd.compiler.pipeline import check, compile_model
from mlc_amd.runtime.artifact import ranks
from mlc_amd.runtime.artifact.artifact import Artifact
from mlc_amd.runtime.artifact.ranks import rank_artifact
from mlc_amd.runtime.artifact.weight_block import byte_count
from mlc_amd.runtime.devices import opening
from mlc_amd.runtime.devices.steps import write_private_pages, write_step
from mlc_amd.runtime.engine.engine import Engine
from mlc_amd.runtime.errors import MachineError, UsageError, UserError
from mlc_amd.runtime.exchange_layout import THEN
from mlc_amd.runtime.options import CompileOptions, RunOptions

RNG = np.random.default_rng(3)
PROMPTS = [RNG.integers(0, 1000, count).tolist() for count in (5, 40, 90, 70, 30)]
TWO = RunOptions(devices=(0, 0), kv_tokens=1024)
MOST = 1e-4  # KL divergence from one device
FUNCTIONS = ("decode", "step_8", "prefill_64", "score_64")


@pytest.fixture(scope="module", autouse=True)
def lavapipe():
    return vulkan_harness.gpu()


@pytest.fixture(scope="module")
def divided(tmp_path_factory):
    out = tmp_path_factory.mktemp("tensor") / "model"
    options = CompileOptions(target="vulkan", arch="lavapipe", ctx=128, split="tensor", gpus=2, tuned="none")
    with few_functions(FUNCTIONS):
        compile_model(synthetic("tiny:q4_0"), out, options)
    check(synthetic("tiny:q4_0"), out, options)  # what it compiled itself it would replace
    return out


@pytest.fixture(scope="module")
def two(divided):
    with Engine.load(divided, TWO) as engine:
        vulkan_harness.run_one_by_one(engine.device, engine.device.manifest["functions"])
        yield engine


def divergence(exact, found) -> float:
    p, q = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (exact.astype(float), found.astype(float)))
    return float((np.exp(p) * (p - q)).sum(-1).mean())


def test_logits_are_those_of_one_device(one, two):
    assert len(two.device.stages) == 2
    ids, found = PROMPTS[2], []
    for engine in one, two:
        engine.reset()
        prefilled = engine.prefill(ids).copy()
        decoded = [engine.decode(token).copy() for token in (7, 300, 11)]
        engine.reset()
        found.append([prefilled, *decoded, engine.score(ids).copy()])
    assert all(divergence(a, b) < MOST for a, b in zip(*found, strict=True))


def test_products_that_exchange_their_results(divided, monkeypatch):
    """In one launch with the exchange after them, on devices that really wait for one another: the same bits."""
    monkeypatch.setattr(opening, "exchanges_inline", lambda *_: True)
    found, counts = [], []
    for joint in (True, False):
        if not joint:
            monkeypatch.setattr(ranks, "joint_name", lambda product, total: "")
        with Engine.load(divided, TWO) as engine:
            launches = engine.device.stages[0].manifest["functions"]["decode"]["launches"]
            counts.append([launch["kernel"].count(THEN) for launch in launches])
            found.append([engine.decode(token).copy() for token in (7, 300)])
            found[-1] += [stage.read("logits", 1).copy() for stage in engine.device.stages]
    assert sum(counts[0]) == 4 and len(counts[1]) == len(counts[0]) + 4
    assert all(np.array_equal(a, b) for a, b in zip(*found, strict=True)) and np.array_equal(*found[0][-2:])


def test_joint_launches_write_nothing_that_they_read(divided):
    manifest = rank_artifact(Artifact.open(divided), 0, inline=True).manifest
    roles = {kernel["name"]: [param["role"] for param in kernel["params"]] for kernel in manifest["kernels"]}
    checked = 0
    for launch in (one for f in manifest["functions"].values() for one in f["launches"] if THEN in one["kernel"]):
        args = [(*arg, role) for arg, role in zip(launch["args"], roles[launch["kernel"]], strict=False)]
        spans = [(at, at + byte_count(*of), role) for kind, at, *of, role in args if kind == "arena"]
        written = [span for span in spans if span[2] in ("output", "work")]
        overlap = [(a, b) for a in written for b in spans if a is not b and a[0] < b[1] and b[0] < a[1]]
        assert len(written) > 2 and not overlap
        checked += 1
    assert checked == 8  # of one row and of eight


# Whose operators or streams others do not have
OWN_PARTS = (
    "bloom", "deepseek32", "deepseek4", "glm-dsa", "hy_v4", "kimi-k3", "mamba", "minimax-m3", "qwen4exp", "step35",
)  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("name", OWN_PARTS)
def test_parts_of_other_layers(tmp_path, name):
    options = CompileOptions(target="vulkan", arch="lavapipe", ctx=128, split="tensor", gpus=2, tuned="none")
    with few_functions(FUNCTIONS):
        compile_model(architectures.tiny(name), tmp_path / "model", options)
    exact = architectures.exact()
    with Engine.load(tmp_path / "model", TWO) as engine:
        assert divergence(exact[name], engine.score(exact["ids"])[exact["positions"]]) < MOST
        engine.reset()
        assert np.isfinite(engine.prefill(exact["ids"][:40])).all() and np.isfinite(engine.decode(7)).all()


def test_halves_of_a_chunk_are_computed_side_by_side(two, monkeypatch):
    """With the bits of one after the other."""
    device, found = two.device, []
    ids, half = PROMPTS[2][:60], device.manifest["functions"]["prefill_32"]["rows"]
    assert device.can_run_beside("prefill_32")
    together = []
    run_beside = device.run_beside
    monkeypatch.setattr(device, "run_beside", lambda name: together.append(name) or run_beside(name))
    for chunks in ([ids], [ids[:half], ids[half:]]):
        two.reset()
        found.append([two.prefill(chunk).copy() for chunk in chunks][-1])
        found[-1] = [found[-1], two.decode(5).copy()]
    assert together == ["prefill_32"]
    np.testing.assert_array_equal(*found)


def test_chunks_are_computed_side_by_side_only_with_functions_that_are_cut_at_the_same_layers(two, monkeypatch):
    """Else layers of the second would read keys that the first has not written."""
    device, turns = two.device, []
    monkeypatch.setattr(device, "_in_turn", lambda *functions: turns.append(functions))
    device.run_beside("prefill_32")
    device.run("prefill_64")
    monkeypatch.setitem(device._rounds, "prefill_64", [[2, 64]])  # two layers exchange rows within the first segment
    device.run_beside("prefill_32")
    device.run("prefill_64")
    assert turns == [("prefill_32@", "prefill_64"), ("prefill_32@",), ("", "prefill_64")]


def test_all_gpus_hold_the_same_rows(two):
    two.reset()
    two.prefill(PROMPTS[4])
    first, second = (device.read("logits", 1).copy() for device in two.device.stages)
    np.testing.assert_array_equal(first, second)


def test_a_cache_holds_a_part_of_the_heads(one, two):
    for name, ((pages, *whole), _) in one.device.kv_types.items():
        if name.startswith(("k.", "v.")):
            (count, *part), _ = two.device.kv_types[name]
            assert count == pages and np.prod(part) * 2 == np.prod(whole)


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


def test_times_are_those_of_all_launches(two):
    launches = two.device.manifest["functions"]["decode"]["launches"]
    found = [kernel for kernel, *_ in two.time([3])[2]]
    kept = [
        kernel for i, kernel in enumerate(found) if found[i - 1 : i] != [kernel]
    ]  # of several steps of a kernel one
    assert kept == [launch["kernel"] for launch in launches]


def test_times_of_a_chunk_that_is_computed_by_halves(two):
    function, tokens, times = two.time(PROMPTS[2])
    assert (function, tokens) == ("prefill_64", 64) and times


def test_answers_to_many_and_cancelled_ones_free_their_pages(two):
    draw = np.random.default_rng(1)
    for _ in range(2):
        found = [two.generate([*PROMPTS[0], i], max_tokens=4) for i in draw.integers(0, 1000, 6).tolist()]
        texts: list[list[int]] = [[] for _ in found]

        def consume(place, count, found=found, texts=texts):
            for piece in found[place]:
                texts[place].append(piece.id)
                if len(texts[place]) == count:
                    break
            found[place].close()

        counts = draw.integers(1, 6, len(found)).tolist()
        threads = [threading.Thread(target=consume, args=one) for one in enumerate(counts)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [len(text) for text in texts] == [min(count, 4) for count in counts]
    two.reset()
    assert all(pool.available == pool.pages for pool in two.cache.pools.values())


def test_a_gpu_that_fails_ends_all_steps_with_one_error(divided, monkeypatch):
    with Engine.load(divided, TWO) as engine:
        engine.prefill(PROMPTS[0])

        def fail(function):
            raise MachineError("the second GPU was reset")

        monkeypatch.setattr(engine.device.stages[1], "begin", fail)
        with pytest.raises(MachineError, match="second GPU was reset"):
            engine.prefill([1, 2])
        monkeypatch.undo()
        with pytest.raises(MachineError, match="load the model again"):
            engine.prefill([1, 2])


LOST = [(number, inline) for number in (0, 1) for inline in (False, True)]


@pytest.mark.parametrize(("number", "inline"), sample(LOST, LOST[1:3]))
def test_a_gpu_that_is_lost(divided, monkeypatch, number, inline):
    """It closes by itself: no thread may use its memory then."""
    monkeypatch.setattr(opening, "exchanges_inline", lambda *_: inline)
    before = relay_threads()
    with Engine.load(divided, TWO) as engine:
        device = engine.device
        assert (relay_threads() > before) == inline
        vulkan_harness.lose(device.stages[number])
        with pytest.raises(MachineError, match=r"GPU 0, .*, was reset while .*load the model again") as found:
            engine.decode(1)
        assert "\n" not in str(found.value)
        assert relay_threads() == before
        with pytest.raises(MachineError, match="load the model again"):
            engine.decode(1)
    assert not any(stage.close.alive for stage in device.stages)


def test_a_run_is_recorded_for_all_gpus_before_one_computes(divided, monkeypatch):
    """Kernels of the first one would wait for the others meanwhile."""
    monkeypatch.setattr(opening, "exchanges_inline", lambda *_: True)
    events = []

    def started(function, meanwhile=None):
        events.append("started")
        if callable(meanwhile):  # `late` of runs that start ahead
            meanwhile()

    with Engine.load(divided, TWO) as engine:
        for stage in engine.device.stages:
            record = stage._replays._record_groups
            noted = lambda *args, record=record, **more: events.append("recorded") or record(*args, **more)  # noqa: E731
            monkeypatch.setattr(stage._replays, "_record_groups", noted)
            monkeypatch.setattr(stage, "start", started)
            monkeypatch.setattr(stage, "start_ahead", started)
        for run in (lambda: engine.device.start("decode", lambda: None), lambda: engine.device.start_ahead("decode")):
            events.clear()
            run()
            assert events == ["recorded"] * 2 + ["started"] * 2


def test_others_begin_once_the_gpu_that_records_a_plain_run_computes(two, monkeypatch):
    device, events = two.device, []
    first, last = device.stages
    record, begin = last._replays._record_groups, first.begin
    monkeypatch.setattr(last._replays, "_record_groups", lambda *args: events.append("recorded") or record(*args))
    monkeypatch.setattr(first, "begin", lambda name: events.append("begun") or begin(name))
    write_private_pages(device, device.manifest)
    write_step(device, device.manifest["functions"]["decode"], [(3, 0, 0)])
    device.run_plain("decode")
    assert events == ["recorded", "begun"] * len(device._segments["decode"])


def relay_threads() -> int:
    return sum(thread.name == "mlc-amd relay" for thread in threading.enumerate())


def test_too_little_memory_on_the_second_gpu(divided, monkeypatch):
    vulkan_harness.short_second(monkeypatch)
    with pytest.raises(UserError, match=r"GPU 0: out of GPU memory: .* are free"):
        Engine.load(divided, TWO)


def test_a_gpu_that_is_slower_by_a_second(one, two, monkeypatch):
    finished, since = two.device.stages[1].finished, time.perf_counter()
    monkeypatch.setattr(two.device.stages[1], "finished", lambda: time.perf_counter() - since > 1 and finished())
    found = []
    for engine in one, two:
        engine.reset()
        found.append(engine.decode(5).copy())
    assert divergence(*found) < MOST


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "was compiled for 2 GPUs .* and this machine has"),
        ({"devices": (0,)}, "name 2 with --devices"),
        ({"device": "0"}, "name 2 with --devices"),
        ({"devices": (0, 9)}, "no GPU 9 here"),
    ],
    ids=str,
)
def test_gpus_that_cannot_share_it(divided, options, message):
    with pytest.raises(UserError, match=message):
        Engine.load(divided, RunOptions(**options))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"split": "tensor"}, UsageError, "for how many GPUs with --gpus"),
        ({"gpus": 2}, UsageError, "--gpus is for --split tensor"),
        ({"split": "tensor", "gpus": 9}, UsageError, "at most 8"),
        ({"split": "tensor", "gpus": 2, "target": "cpu", "arch": "native"}, UsageError, "only GPUs share a model"),
    ],
    ids=str,
)
def test_what_cannot_be_compiled(tmp_path, options, error, message):
    given = {"target": "vulkan", "arch": "generic"} | options
    with pytest.raises(error, match=message):
        check(synthetic("tiny:q4_0"), tmp_path / "model", CompileOptions(**given))
