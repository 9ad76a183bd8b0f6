"""The rocm device without a GPU, on a stand-in for AMD's bindings that computes (hip_recorder)."""

import gc
from dataclasses import asdict

import numpy as np
import pytest
from hip_model import (
    CTX,
    HEAD,
    IDS,
    KERNELS,
    RNG,
    SLOT,
    VOCAB,
    WIDTH,
    artifact_in,
    check,
    facts,
    write_pages,
)
from workloads import built

from mlc_amd.compiler.codegen.rocm import compile_hsaco
from mlc_amd.runtime.artifact.weight_block import TensorSpec
from mlc_amd.runtime.artifact.weights_file import Weights, WeightsWriter
from mlc_amd.runtime.cache.kv_pool import KvSize
from mlc_amd.runtime.cache.pages import PAGE
from mlc_amd.runtime.cache.sequence import ChunkRows
from mlc_amd.runtime.devices import placement
from mlc_amd.runtime.devices.hip import memory as hip_memory
from mlc_amd.runtime.devices.hip.device import HipDevice
from mlc_amd.runtime.devices.steps import write_step
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.host import RESERVE
from mlc_amd.schedules.gpu.base.arch import resolve
from mlc_amd.schedules.operators import Embed, RmsNorm
from tests.dev.hip_emulated import emulated
from tests.dev.hip_recorder import Recorder


@pytest.fixture
def artifact(tmp_path):
    return artifact_in(tmp_path)


# ---- computing


def test_computes_by_replaying_graphs(artifact, monkeypatch):
    monkeypatch.setattr(placement, "CHUNK", 1000)  # several chunks, and none that tensors begin at
    bindings = Recorder(KERNELS)
    device = HipDevice(artifact("gfx1100"), bindings=bindings)
    assert device.name == "Radeon (gfx1100)"
    bindings.calls.clear()
    check(device)
    assert bindings.calls.count("hipGraphLaunch") == 5 and "hipModuleLaunchKernel" not in bindings.calls
    device.run("decode")
    assert bindings.launched[-4:] == [
        (symbol, (4, 1, 1), (64, 1, 1)) for symbol in ("embed_k", "mix_k", "mix_k_1", "last_k")
    ]


def test_long_steps_are_launched_in_pieces(artifact):
    """With a wait after each; short ones are one graph again."""
    bindings = Recorder(KERNELS)
    device = HipDevice(artifact("gfx1100"), bindings=bindings)
    device.pacer.limit = 1e-9
    bindings.calls.clear(), bindings.launched.clear()
    check(device)
    assert "hipGraphLaunch" not in bindings.calls and len(bindings.launched) == 5 * 4
    assert bindings.calls.count("hipStreamSynchronize") == 1 + 5 * 4 + 4  # clear; runs; reads
    bindings.calls.clear()
    assert [kernel for kernel, _, _ in device.time("decode")] == ["embed", "mix", "mix", "last"]
    assert bindings.calls.count("hipStreamSynchronize") == 4
    device.pacer.limit = 10.0
    bindings.calls.clear()
    check(device)
    assert bindings.calls.count("hipGraphLaunch") == 5 and "hipModuleLaunchKernel" not in bindings.calls


@pytest.mark.parametrize("graphs", [True, False])
def test_masks_may_come_while_it_computes(artifact, monkeypatch, graphs):
    """Kernels that choose tokens are launched after them, all others before."""
    if not graphs:
        monkeypatch.setenv("MLC_AMD_GRAPH", "0")
    bindings = Recorder(KERNELS)
    device = HipDevice(artifact("gfx1100"), bindings=bindings)
    begun, rng = [], np.random.default_rng(2)
    write_pages(device, 0)
    device.write("sampling", [0])

    def allow(words):
        begun.append(bindings.calls[-1])
        bindings._flush()
        assert "last_k" in [symbol for symbol, *_ in bindings.launched]
        assert "pick_k" not in [symbol for symbol, *_ in bindings.launched]
        device.write("allowed", words)

    for i, limit in enumerate((0.5, 0.5, 1e-9, 0.5)):
        device.pacer.limit = limit
        bindings.launched.clear()
        write_step(device, device.manifest["functions"]["pick"], [(i, 0, SLOT)])
        words = rng.integers(0, 1 << 31, (1, VOCAB // 32), np.int32)
        long = limit < 0.5  # in pieces, which masks come before
        device.run("pick", lambda words=words, long=long: device.write("allowed", words) if long else allow(words))
        may = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        (token,) = device.read("sampled", 1)
        assert token == may[np.argmax(device.read("logits", 1)[0, may])]
        assert [symbol for symbol, *_ in bindings.launched][-2:] == ["last_k", "pick_k"]
    assert begun == 3 * ["hipGraphLaunch" if graphs else "hipModuleLaunchKernel"]
    assert bindings.calls.count("hipGraphInstantiate") == graphs * (len(device.manifest["functions"]) + 1)

    def fails():
        raise ZeroDivisionError

    bindings.launched.clear()
    with pytest.raises(ZeroDivisionError):
        device.run("pick", fails)
    assert not bindings.queue and [symbol for symbol, *_ in bindings.launched][-1:] == ["last_k"]
    check(device)


def test_weights_arrive_whole_and_in_chunks(artifact, monkeypatch):
    monkeypatch.setattr(placement, "CHUNK", 1000)
    bindings = Recorder(KERNELS)
    model = artifact("gfx1100")
    device = HipDevice(model, bindings=bindings)
    held = Weights(model.path / "weights.safetensors")
    there = bindings.bytes_at(device.memory.blocks["weights"][0], held.total)
    assert there.tobytes() == held.map[held.start : held.start + held.total]
    chunks = -(-held.total // 1000)
    assert bindings.calls.count("hipEventRecord") == chunks > 10
    assert bindings.used("host") < 1 << 20  # staging memory is given back


def test_cache_starts_and_clears_to_zero(artifact):
    bindings = Recorder(KERNELS)
    device = HipDevice(artifact("gfx1100"), bindings=bindings)
    address, size = device.memory.blocks["kv"][0], device.memory.sizes["kv"]
    assert not bindings.bytes_at(address, size).any()
    check(device)
    assert bindings.bytes_at(address, size).any()
    device.clear()
    assert not bindings.bytes_at(address, size).any()


def test_pages_are_as_many_as_asked_for(artifact):
    device = HipDevice(artifact("gfx1100"), bindings=Recorder(KERNELS), kv=KvSize(tokens=9 * PAGE))
    assert device.memory.sizes["kv"] >= 9 * PAGE * WIDTH * 4
    check(device)


def test_a_cache_of_what_is_left(artifact, monkeypatch):
    """Of a GPU all but the reserve, of an APU no more than half of the available memory; in either case no more than
    a step's sequences can use, which here are four."""
    model, page = artifact("gfx1100"), PAGE * WIDTH * 4
    loaded = HipDevice(model, bindings=Recorder(KERNELS))
    others = sum(size for name, size in loaded.memory.sizes.items() if name != "kv")

    def pages(memory, integrated=0):
        bindings = Recorder(KERNELS, memory=memory, gpus=[{"integrated": integrated}])
        device = HipDevice(model, bindings=bindings, kv=KvSize.of(memory="auto"))
        check(device)
        return device.kv_types["cache"][0][0]

    assert pages(RESERVE + others + 3 * page + 1000) == 3
    assert pages(2 * RESERVE) == 4 * CTX // PAGE
    monkeypatch.setattr(hip_memory, "available_memory", lambda: 2 * (others + 2 * page + 1000))
    assert pages(RESERVE, integrated=1) == 2
    with pytest.raises(UserError, match="what the device has left is too small for a KV cache of 64 tokens"):
        pages(RESERVE)


def test_page_tables_are_sent_when_they_changed(artifact):
    """Beside a copy of the inputs and one of the results."""
    bindings = Recorder(KERNELS)
    device = HipDevice(artifact("gfx1100"), bindings=bindings)
    check(device)
    for changed, copies in ((False, 2), (True, 3), (False, 2)):
        bindings.calls.clear()
        if changed:
            write_pages(device, 2)
        device.run("decode")
        assert bindings.calls.count("hipMemcpyAsync") == copies


def test_everything_is_given_back(artifact):
    bindings = Recorder(KERNELS)
    device = HipDevice(artifact("gfx1100"), bindings=bindings)
    device.run("decode")
    device.close()
    assert bindings.leaks() == []
    bindings = Recorder(KERNELS)
    device = HipDevice(artifact("gfx1100"), bindings=bindings)
    assert bindings.leaks()
    del device
    gc.collect()
    assert bindings.leaks() == []


@pytest.mark.full
@pytest.mark.emulator
@pytest.mark.parametrize("arch", ["gfx1100", "gfx1201"])
def test_real_code_object(artifact, emulator, arch):
    """Kernels of the compiler in the ISA emulator, through this device: the normalized row of each token's
    embedding."""
    gpu, k = resolve(arch), 96
    model = artifact(arch)
    weights = [TensorSpec("table", "float32", (VOCAB, k)), TensorSpec("gain", "float32", (k,))]
    table, gain = RNG.standard_normal((VOCAB, k), np.float32), RNG.standard_normal(k, np.float32)
    writer = WeightsWriter(model.path / "weights.safetensors", weights)
    writer.write("table", 0, table)
    writer.write("gain", 0, gain)
    writer.close()
    x, io = ["arena", 0, "float32", [16, k]], {name: ["io", name] for name in ("state", "tokens", "logits")}
    calls = [{"kernel": "e", "args": [io["state"], io["tokens"], ["weight", "table"], x]},
             {"kernel": "n", "args": [io["state"], x, ["weight", "gain"], io["logits"]]}]  # fmt: skip
    norm = RmsNorm(k=k, m=16, eps=1e-6, layout="", rows="all")
    kernels = {"e": built(Embed(fmt="f32", vocab=VOCAB, k=k, m=16), gpu, "e"), "n": built(norm, gpu, "n")}
    module = compile_hsaco(kernels, gpu)
    (model.path / f"{arch}.hsaco").write_bytes(module.hsaco)
    steps = {
        name: {"scratch": list(f.scratch), "steps": [asdict(step) for step in f.launches]}
        for name, f in module.functions.items()
    }
    manifest = model.manifest
    manifest |= {
        "functions": {"score_16": {"rows": 16, "single": 0, "logits": 16, "launches": calls}},
        "kernels": [facts(name) for name in kernels],
        "launches": {arch: steps},
    }
    manifest["io"]["logits"]["shape"] = [16, k]
    bindings = Recorder(emulated(manifest, arch, module.hsaco, emulator), gpus=[{"gcnArchName": arch.encode()}])
    device = HipDevice(model, bindings=bindings)
    write_step(device, manifest["functions"]["score_16"], (), ChunkRows(IDS[:5], 0, 0))
    device.run("score_16")
    rows = table[IDS[:5]]
    expect = rows / np.sqrt((rows**2).mean(1, keepdims=True) + 1e-6) * gain
    np.testing.assert_allclose(device.read("logits", 5), expect, rtol=1e-5, atol=1e-6)
    assert "hipGraphLaunch" in bindings.calls[-5:]


# ---- graphs that do not work


def stale(count, arguments):
    """A driver whose replays see the state of the first one."""
    state = arguments[0]
    if count == 1:
        stale.first = state[:16].copy()
    else:
        state[:16] = stale.first


def never(count, arguments):
    return False


def once(count, arguments):
    return count == 1


@pytest.mark.parametrize("broken", [stale, never, once])
def test_wrong_replays_are_found_at_load(artifact, caplog, broken):
    bindings = Recorder(KERNELS, before_replay=broken)
    device = HipDevice(artifact("gfx1100"), bindings=bindings)
    assert "differ from launches" in caplog.text
    bindings.calls.clear()
    check(device)
    assert "hipGraphLaunch" not in bindings.calls


@pytest.mark.parametrize(
    "call", ["hipStreamBeginCapture", "hipStreamEndCapture", "hipGraphInstantiate", "hipGraphLaunch"]
)
def test_without_graphs_launches_go_one_by_one(artifact, caplog, call):
    bindings = Recorder(KERNELS, fail={call: "hipErrorStreamCaptureUnsupported"})
    device = HipDevice(artifact("gfx1100"), bindings=bindings)
    assert "continuing without them" in caplog.text and call in caplog.text
    check(device)


def test_graphs_can_be_switched_off(artifact, monkeypatch, caplog):
    monkeypatch.setenv("MLC_AMD_GRAPH", "0")
    bindings = Recorder(KERNELS)
    device = HipDevice(artifact("gfx1100"), bindings=bindings)
    for name in ("kv", "arena", "io"):
        assert not bindings.bytes_at(device.memory.blocks[name][0], device.memory.sizes[name]).any()
    check(device)
    assert "hipStreamBeginCapture" not in bindings.calls and not caplog.text


# ---- memory


def test_out_of_memory_says_what_fits(artifact):
    bindings = Recorder(KERNELS, memory=48 << 10)
    with pytest.raises(
        UserError, match=r"needs .* GiB \(weights .*, KV cache .* at --ctx 256\).*try --ctx (64|128), or close"
    ) as error:
        HipDevice(artifact("gfx1100"), bindings=bindings)
    assert error.tb is not None and bindings.leaks() == []  # although the traceback holds the device


def test_out_of_memory_with_the_weights_alone(artifact):
    with pytest.raises(UserError, match="smaller quantization"):
        HipDevice(artifact("gfx1100"), bindings=Recorder(KERNELS, memory=8 << 10))


def test_experts_in_host_memory(artifact):
    """They need no device memory and no staging, an APU ignores the flag, and too little host memory is an error."""
    bindings, model = Recorder(KERNELS), artifact("gfx1100")
    whole = HipDevice(model, bindings=bindings)
    used = bindings.used("device")
    whole.close()
    device = HipDevice(model, bindings=bindings, n_cpu_moe=1)
    check(device)
    assert used - bindings.used("device") >= HEAD.nbytes
    assert HEAD.tobytes() in [memory.tobytes() for memory, where in bindings.blocks.values() if where == "host"]
    device.close()
    assert bindings.leaks() == []
    apu = Recorder(KERNELS, gpus=[{"integrated": 1}])
    shared = HipDevice(model, bindings=apu, n_cpu_moe=1)
    assert apu.used("device") == used
    shared.close()
    full = Recorder(KERNELS, fail={"hipHostGetDevicePointer": "hipErrorOutOfMemory"})
    with pytest.raises(UserError, match=r"out of host memory: --n-cpu-moe 1 needs .*ttm\.pages_limit"):
        HipDevice(model, bindings=full, n_cpu_moe=1)
    with pytest.raises(UserError, match=r"this model needs .*; try --ctx 192 or --n-cpu-moe 1, or close"):
        HipDevice(model, bindings=Recorder(KERNELS, memory=56 << 10))


def test_apu_takes_its_carve_out_when_all_fits(artifact):
    bindings = Recorder(KERNELS, gpus=[{"integrated": 1}])
    model = artifact("gfx1100")
    device = HipDevice(model, bindings=bindings)
    assert not device.memory.host_memory and bindings.used("device") > model.weights.total
    check(device)


def test_apu_works_in_host_memory_without_a_copy(artifact):
    bindings = Recorder(KERNELS, gpus=[{"integrated": 1}], memory=8 << 10)
    device = HipDevice(artifact("gfx1100"), bindings=bindings)
    assert device.memory.host_memory and bindings.used("device") == 0
    # no staging, no second copy
    assert bindings.used("host") < sum(device.memory.sizes.values()) + device.memory.sizes["io"] + 1
    assert "hipEventRecord" not in bindings.calls
    check(device)


def test_apu_out_of_memory_explains_its_limits(artifact, monkeypatch):
    monkeypatch.setattr(hip_memory, "gpu_memory", lambda pci: {"vram": 512 << 20, "gtt": 8 << 30})
    bindings = Recorder(
        KERNELS, gpus=[{"integrated": 1}], memory=8 << 10, fail={"hipHostMalloc": "hipErrorOutOfMemory"}
    )
    with pytest.raises(
        UserError,
        match=r"0\.5 GiB carved out in the BIOS setup or 8\.0 GiB of the system's memory .*ttm\.pages_limit=\d+",
    ):
        HipDevice(artifact("gfx1100"), bindings=bindings)


def test_pages_are_read_and_written(artifact):
    device = HipDevice(artifact("gfx1100"), bindings=Recorder(KERNELS))
    (part,) = device.page_parts(0)
    assert part == ("cache", PAGE * WIDTH * 4)
    contents = np.random.default_rng(1).integers(0, 256, (2, part[1]), np.uint8)
    device.write_pages(0, [2, 1], contents)
    assert (device.read_pages(0, [1, 2, 3]) == [*contents[::-1], np.zeros(part[1])]).all()
    device.write_pages(0, [3], contents[:1])  # through the memory that is there
    assert (device.read_pages(0, [3, 1]) == contents).all()
    memory = device.page_memory(0, 3)
    memory[1:] = contents
    device.write_pages(0, [3, 0], memory[1:])  # as it stands
    assert (device.read_pages(0, [3, 0]) == contents).all()
