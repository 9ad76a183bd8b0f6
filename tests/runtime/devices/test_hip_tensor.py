"""A model that AMD GPUs compute together, each a part of every product, on a stand-in for AMD's bindings: by words that
kernels write to the other GPUs' memory, and by copies."""

import logging

import numpy as np
import pytest
from hip_model import IDS, SLOT, evaluate, expected, write_pages
from hip_tensor import divided_in, machine

from mlc_amd.runtime.cache.sequence import ChunkRows
from mlc_amd.runtime.devices import handover
from mlc_amd.runtime.devices.exchange import check_hip
from mlc_amd.runtime.devices.exchange.hip import PeerBoxes
from mlc_amd.runtime.devices.hip.api import HipError
from mlc_amd.runtime.devices.opening import open_device
from mlc_amd.runtime.devices.steps import write_step
from mlc_amd.runtime.errors import MachineError, UserError

EXACT, ROUNDED = 1e-5, 2e-2  # words have float16


def right(device, within):
    np.testing.assert_allclose(evaluate(device, IDS), expected(IDS), rtol=1e-4, atol=within)
    first, *others = [stage.read("logits", 1) for stage in device.stages]
    for other in others:
        np.testing.assert_array_equal(first, other)


def opened(folder, parts=2):
    return open_device(divided_in(folder, parts), devices=tuple(range(parts)))


def step(device, name="decode", position=20):
    token = ([(7, position, SLOT)], None) if name == "decode" else ((), ChunkRows([7], position, SLOT))
    write_step(device, device.manifest["functions"][name], *token)
    device.run(name)


@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("graphs", [True, False])
def test_words_cross_while_kernels_run(tmp_path, monkeypatch, caplog, parts, graphs):
    caplog.set_level(logging.INFO)
    if not graphs:
        monkeypatch.setenv("MLC_AMD_GRAPH", "0")
    bindings = machine(monkeypatch, parts)
    device = opened(tmp_path, parts)
    assert "exchange rows while kernels run" in caplog.text and isinstance(device._boxes, PeerBoxes)
    assert [stage.graphs for stage in device.stages] == [graphs] * parts
    bindings.calls.clear(), bindings.launched.clear()
    right(device, ROUNDED)
    assert ("hipGraphLaunch" in bindings.calls) == graphs
    sums = [symbol for symbol, *_ in bindings.launched if symbol.startswith(("words", "sum"))]
    assert sums == ["sum_16_k"] * 3 * parts + ["words_1_k"] * 2 * parts
    assert {len(device._segments[name]) for name in ("decode", "pick_4")} == {1}
    device.close()
    assert bindings.leaks() == []


def test_steps_begin_ahead(tmp_path, monkeypatch):
    """And the choice of tokens after their masks have come."""
    machine(monkeypatch)
    device = opened(tmp_path)
    write_pages(device, 0)
    device.write("sampling", np.zeros(16, np.int32))
    found = []
    write_step(device, device.manifest["functions"]["pick"], [(7, 0, SLOT)])
    device.start("pick", lambda: device.write("allowed", np.full((1, 3), -1, np.int32)))
    for position in (1, 2):
        assert device.can_start_ahead("pick")
        write_step(device, device.manifest["functions"]["pick"], [(0, position, SLOT)])
        device.start_ahead("pick")
        device.wait()
        found.append(int(device.read("sampled", 1)[0]))
    device.wait()
    ids = np.array([7, *found])
    assert found == expected(ids).argmax(-1)[:2].tolist()


def test_copies_where_gpus_cannot_access_each_other(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    bindings = machine(monkeypatch, gpus=[{}, {"peers": False}])
    device = opened(tmp_path)
    assert "in copies between kernels: GPU 1 cannot access the memory of GPU 0" in caplog.text
    bindings.launched.clear()
    right(device, EXACT)
    assert not any(symbol.startswith("words") for symbol, *_ in bindings.launched)
    device.close()
    assert bindings.leaks() == []


def test_large_copies_have_streams_of_their_own(tmp_path, monkeypatch):
    """So that two runs take turns: each computes while rows of the other cross."""
    monkeypatch.setattr(handover, "APART", 1)
    bindings = machine(monkeypatch, gpus=[{}, {"peers": False}])
    device = opened(tmp_path)
    bindings.calls.clear()
    right(device, EXACT)
    alone = device.read("logits", 16).copy()
    assert "hipStreamWaitEvent" in bindings.calls
    device._in_turn("score_16", "score_16")
    np.testing.assert_array_equal(device.read("logits", 16), alone)
    device.close()
    assert bindings.leaks() == []


@pytest.mark.parametrize(
    ("call", "error"),
    [("hipExtMallocWithFlags", "hipErrorOutOfMemory"), ("hipDeviceEnablePeerAccess", "hipErrorInvalidValue")],
)
def test_copies_without_memory_that_others_may_write(tmp_path, monkeypatch, caplog, call, error):
    caplog.set_level(logging.INFO)
    machine(monkeypatch, fail={call: error})
    right(opened(tmp_path), EXACT)
    assert f"({call} failed: {error})" in caplog.text


def test_copies_where_words_are_wrong(tmp_path, monkeypatch, caplog):
    """Memory that is not that of the other GPU, for one word."""
    caplog.set_level(logging.INFO)
    bindings = machine(monkeypatch)
    count, exchange = bindings.kernels["probe_k"]
    calls = []

    def wrong(launch, x, *arrays):
        calls.append(0)
        x = x.copy()
        x[7] ^= 0x80 * (len(calls) == 100)
        return exchange(launch, x, *arrays)

    bindings.kernels["probe_k"] = count, wrong
    right(opened(tmp_path), EXACT)
    assert "got wrong words" in caplog.text


def test_copies_where_a_gpu_fails_in_the_check(tmp_path, monkeypatch, caplog):
    """The other one still waits for its words when memory is freed."""
    caplog.set_level(logging.INFO)
    bindings = machine(monkeypatch)
    enqueue = check_hip.enqueue

    def fail(hip, stream, launches):
        if stream.gpu == 1:
            raise HipError("hipModuleLaunchKernel", "hipErrorLaunchFailure")
        enqueue(hip, stream, launches)

    monkeypatch.setattr(check_hip, "enqueue", fail)
    device = opened(tmp_path)
    assert "in copies between kernels: hipModuleLaunchKernel failed: hipErrorLaunchFailure" in caplog.text
    right(device, EXACT)
    device.close()
    assert bindings.leaks() == []


def test_graphs_that_replay_stale_data_are_not_used(tmp_path, monkeypatch, caplog):
    bindings = machine(monkeypatch, before_replay=lambda count, arguments: count < 2)
    device = opened(tmp_path)
    assert not any(stage.graphs for stage in device.stages) and "HIP graphs do not work" in caplog.text
    right(device, ROUNDED)
    device.close()
    assert bindings.leaks() == []


def test_a_gpu_without_graphs_still_computes_with_the_others(tmp_path, monkeypatch, caplog):
    bindings = machine(monkeypatch, fail={"hipGraphInstantiate": "hipErrorStreamCaptureUnsupported"})
    bindings.fail_on = 1
    device = opened(tmp_path)
    assert not device.stages[1].graphs
    right(device, ROUNDED)


# ---- faults


def test_a_gpu_that_does_not_answer(tmp_path, monkeypatch):
    bindings = machine(monkeypatch)
    device = opened(tmp_path)
    monkeypatch.setattr(device.stages[1]._queue, "start", lambda *_: None)  # its kernels never start
    monkeypatch.setattr(device.stages[1]._queue, "wait", lambda: None)
    with pytest.raises(MachineError, match=r"GPU 0 .* waited in vain"):
        step(device)
    with pytest.raises(MachineError, match="load the model again"):
        step(device)
    monkeypatch.undo()
    device.close()
    assert bindings.leaks() == []


@pytest.mark.parametrize("call", ["hipGraphLaunch", "hipEventSynchronize", "hipEventQuery", "hipMemcpyAsync"])
@pytest.mark.parametrize("name", ["decode", "score_16"])
def test_a_gpu_that_is_lost(tmp_path, monkeypatch, call, name):
    bindings = machine(monkeypatch)
    device = opened(tmp_path)
    write_pages(device, 0)
    if (call, name) in (("hipEventQuery", "decode"), ("hipEventSynchronize", "score_16")):
        pytest.skip("not called")
    bindings.fail, bindings.fail_on = {call: "hipErrorLaunchFailure"}, 1
    with pytest.raises(MachineError, match=rf"GPU 1, Radeon, .*{call} failed: hipErrorLaunchFailure") as found:
        step(device, name)
    assert "\n" not in str(found.value)
    with pytest.raises(MachineError, match="load the model again"):
        step(device, name)
    bindings.fail = {}
    device.close()
    assert bindings.leaks() == []


def test_too_little_memory_on_the_second_gpu(tmp_path, monkeypatch):
    bindings = machine(monkeypatch, gpus=[{}, {"memory": 100_000}])
    with pytest.raises(UserError, match=r"GPU 1: .*needs .* free"):
        opened(tmp_path)
    assert bindings.leaks() == []


def test_no_memory_for_boxes_once_the_model_is_loaded(tmp_path, monkeypatch):
    bindings = machine(monkeypatch)
    allocate, calls = bindings.hipExtMallocWithFlags, []

    def short(*args):
        calls.append(args)
        return allocate(*args) if len(calls) <= 2 else (bindings.hipError_t.hipErrorOutOfMemory, None)

    monkeypatch.setattr(type(bindings), "hipExtMallocWithFlags", lambda self, *args: short(*args))
    with pytest.raises(MachineError, match=r"no memory that others may write .* smaller --ctx"):
        opened(tmp_path)
    assert bindings.leaks() == []
