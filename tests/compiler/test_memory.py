"""What a model needs of memory, what the commands say of it, and experts that stay in host memory."""

import json
import logging
import time
from dataclasses import replace

import numpy as np
import pytest
from architectures import tiny

from mlc_amd.compiler import memory
from mlc_amd.compiler.codegen.target import make_target
from mlc_amd.compiler.gguf import synthetic
from mlc_amd.compiler.gguf.presets import PRESETS
from mlc_amd.compiler.pipeline import compile_model
from mlc_amd.runtime.artifact.artifact import Artifact
from mlc_amd.runtime.artifact.memory import Needs, of_manifest
from mlc_amd.runtime.devices.opening import open_device
from mlc_amd.runtime.devices.placement import Range, cut, parts
from mlc_amd.runtime.devices.vulkan import device
from mlc_amd.runtime.devices.vulkan.memory import VulkanMemory
from mlc_amd.runtime.engine.engine import Engine
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.gpus import CHIPS, MEMORY
from mlc_amd.runtime.options import CompileOptions, RunOptions
from mlc_amd.tools import cli
from mlc_amd.tools.inspection import inspect_memory

GIB = 1 << 30
IDS = [3, 17, 200, 5, 9, 41, 8, 77, 100, 2, 64, 30, 11, 250, 19, 6, 1]
# 16 GiB of weights, 2 of them experts of each of six layers after a dense one; a cache of 4 GiB
NEEDS = Needs(16 * GIB, (0, *[2 * GIB] * 6), 4 * GIB, GIB >> 10, GIB, 4096, 8192)


# ---- the plan


def test_what_fits():
    assert NEEDS.device() == 21 * GIB and NEEDS.device(2) == 19 * GIB
    assert NEEDS.tokens(21 * GIB) == 4096 and NEEDS.tokens(23 * GIB) == 6144 and NEEDS.tokens(99 * GIB) == 8192
    assert NEEDS.tokens(20 * GIB) == 3072 and NEEDS.tokens(17 * GIB) == 0 and NEEDS.tokens(17 * GIB, 7) == 8192
    assert [NEEDS.layers_on_host(room * GIB) for room in (21, 20, 9, 8)] == [0, 2, 7, None]
    assert NEEDS.advice(20 * GIB, 0) == ["--ctx 3072", "--n-cpu-moe 2"]
    assert NEEDS.advice(4 * GIB, 0) == []
    unified = replace(NEEDS, copies=GIB).in_host_memory()
    assert unified.device() == unified.device(2) == 22 * GIB and unified.advice(21 * GIB, 0) == ["--ctx 3072"]


def test_an_arch_whose_memory_is_the_hosts_needs_the_hosts_copies_too():
    """Where all that it stands for works there; else for those devices alone."""
    needs, whole = replace(NEEDS, copies=GIB), {}
    for kind, arch in (("vulkan", "steamdeck"), ("vulkan", "lavapipe"), ("rocm", "780m"), ("rocm", "780m,7900xtx")):
        whole[arch] = inspect_memory.plan(needs, kind, arch, 2)
    assert [found["total"] // GIB for found in whole.values()] == [22, 22, 22, 19]
    family = inspect_memory.plan(needs, "vulkan", "rdna3", 2)["devices"]
    assert {device["shared"]: device["needed"] // GIB for device in family} == {True: 22, False: 19}


def test_products_of_an_arch():
    """A product stands for itself, a chip and a Vulkan profile for all of theirs; the largest come first."""
    (one,) = inspect_memory.rooms("rocm", "RX 7900 XTX")
    assert (one.name, one.bytes, one.usable, one.shared) == ("7900xtx", 24 * GIB, 23 * GIB, False)
    (deck,) = inspect_memory.rooms("vulkan", "steamdeck")
    assert (deck.usable, deck.shared) == (8 * GIB, True)
    chip = inspect_memory.rooms("rocm", "gfx1100")
    assert [room.bytes // GIB for room in chip] == [48, 32, 24, 20, 16]
    family = {room.name for room in inspect_memory.rooms("vulkan", "rdna3:matrix=none")}
    assert {"7900xtx", "7600", "8060s, strixhalo"} <= family
    assert "8060s" not in inspect_memory.apus("vulkan", "rdna3") and not inspect_memory.apus("rocm", "7900xtx")
    assert inspect_memory.rooms("vulkan", "vangogh,gfx90c") == inspect_memory.rooms("vulkan", "vangogh") == [deck]
    assert inspect_memory.apus("vulkan", "vangogh,gfx90c") == inspect_memory.apus("vulkan", "renoir")
    assert {"renoir", "cezanne"} <= set(inspect_memory.apus("vulkan", "gfx90c"))
    assert inspect_memory.apus("vulkan", "780m") == ["780m"] and inspect_memory.apus("rocm", "gfx1103")[0] == "780m"
    assert inspect_memory.rooms("vulkan", "generic") == inspect_memory.rooms("cpu", "x86-64-v3") == []
    assert MEMORY.keys() <= {product for chip in CHIPS.values() for product in chip.products}


@pytest.mark.parametrize("target, arch", [("cpu", "x86-64-v3"), ("rocm", "gfx1100")])
def test_a_model_that_is_not_compiled_needs_what_its_artifact_would(target, arch):
    """The bytes of a known model: Llama 3 8B in Q4_0 has 4.33 GiB in the file, and 128 KiB of cache a token."""
    backend = make_target(target, arch)
    with synthetic("llama3-8b:q4_0") as model:
        found, longer = memory.needs(model, backend, 4096), memory.needs(model, backend, 8192)
    assert found.weights == pytest.approx(4.21 * GIB, rel=0.01) and not any(found.experts)
    assert longer.device() - found.device() == 4096 * found.token
    assert found.token == (128 << 10) + 4 * 128
    with tiny("qwen3moe", "q4_0") as model:
        experts = memory.needs(model, backend, 64).experts
    assert experts[0] == experts[1] == 3 * 8 * 64 * 256 * 18 // 32


# ---- experts in host memory


def test_ranges():
    tensors = {"a": (0, 100), "b": (128, 64), "c": (192, 1000), "d": (1216, 10)}
    assert cut(tensors, 200) == [Range(0, 192), Range(192, 1192), Range(1216, 1226)]
    assert cut(tensors, 1 << 20) == [Range(0, 1226)]
    assert cut({}, 10) == []
    ranges = cut(tensors, 1 << 20, {"b", "c"})
    assert ranges == [Range(0, 100), Range(128, 1192, True), Range(1216, 1226)]
    assert list(parts(ranges, 90, 50)) == [(ranges[0], 90, 100), (ranges[1], 128, 140)]


def test_experts_in_host_memory(compiled_for, monkeypatch):
    """Of GPUs with their own memory the first layer's, or all, with the same results; in one that works in the host's
    memory nothing changes. The CPU driver's only memory counts as its own: here mapped memory stands for the host's."""
    folder, kinds = compiled_for("vulkan", "lavapipe", ("qwen3moe", "q4_k"), 64, few=True), []
    block = VulkanMemory.block

    def note(self, nbytes, kind):
        kinds.append(kind)
        return block(self, nbytes, "staging" if kind == "host" else kind)

    monkeypatch.setattr(VulkanMemory, "block", note)
    expected = Engine.load(folder, RunOptions(n_cpu_moe=1)).score(IDS)
    assert "host" not in kinds
    monkeypatch.setattr(device, "choose", lambda gpus, *rest: (replace(gpus[0], type="discrete"), "lavapipe"))
    experts = of_manifest(Artifact.open(folder).manifest).experts
    for layers in (1, 99):
        engine = Engine.load(folder, RunOptions(n_cpu_moe=layers))
        assert np.array_equal(engine.score(IDS), expected)
        at_host = [one for one, (made, _) in engine.device._weights.items() if one.host and made.host]
        assert sum(one.nbytes for one in at_host) == sum(experts[:layers]) > 0
        engine.device.close()
    monkeypatch.setattr(VulkanMemory, "block", block)
    with pytest.raises(UserError, match=r"out of host memory: --n-cpu-moe 1 needs .* that the GPU can reach"):
        Engine.load(folder, RunOptions(n_cpu_moe=1))


@pytest.mark.parametrize(("target", "arch"), [("cpu", "x86-64-v3"), ("rocm", "gfx1100"), ("vulkan", "generic")])
def test_a_cache_that_kernels_cannot_address_is_refused_at_once(monkeypatch, tmp_path, target, arch):
    """A long context of 16 heads of 128."""
    long = {"context_length": 1 << 21, "attention.head_count_kv": 16, "block_count": 1}
    monkeypatch.setitem(PRESETS, "long", replace(PRESETS["llama3-8b"], keys={**PRESETS["llama3-8b"].keys, **long}))
    model, backend, start = synthetic("long:q4_0"), make_target(target, arch), time.process_time()
    with pytest.raises(UserError, match=r"--ctx 2097152 is too large: .* use 10485\d\d or less"):
        compile_model(model, tmp_path / "out", CompileOptions(target=target, arch=arch, ctx=1 << 21))
    assert time.process_time() - start < 3
    memory.check_capacity(memory.kept(model.config, backend, 1048512), 1048512)


def test_commands(demo_gguf, monkeypatch, capsys):
    """`inspect` of a file prints the plan of another machine; the flag counts, and needs experts."""
    assert cli.main(["inspect", str(demo_gguf), "--target", "rocm", "--arch", "7900xt", "--ctx", "512"]) == 0
    assert "fits          7900xt (20.00 GiB; 19.00 GiB usable) up to 2048 tokens" in capsys.readouterr().out
    assert cli.main(["inspect", str(demo_gguf), "--target", "vulkan", "--arch", "renoir", "--ctx", "512"]) == 0
    assert "fits          APUs (vega, renoir," in (shown := capsys.readouterr().out) and "vii" not in shown
    monkeypatch.setitem(MEMORY, "7900xt", (1,))
    assert cli.main(["inspect", str(demo_gguf), "--target", "rocm", "--arch", "7900xt", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["memory"]["devices"]
    assert (found["usable"], found["tokens"], found["advice"]) == (0, 0, [])
    assert cli.main(["inspect", str(demo_gguf), "--n-cpu-moe", "1"]) == 1
    assert "this model has no experts" in capsys.readouterr().err


def test_experts_of_other_targets(demo_artifact, caplog):
    """A model without experts is an error; a CPU has no other memory, and a note says so."""
    dense = Artifact.open(demo_artifact)
    for layers, message in ((1, "this model has no experts"), (-1, "--n-cpu-moe is -1: it must not be negative")):
        with pytest.raises(UserError, match=message):
            open_device(dense, n_cpu_moe=layers)
    mixture = Artifact(dense.path, dense.manifest | {"tensors": {"blk.0.ffn_up_exps.weight/codes": {}}})
    with caplog.at_level(logging.WARNING):
        open_device(mixture, n_cpu_moe=1)
    assert "--n-cpu-moe has no effect" in caplog.text
