"""Devices whose memory is the host's, on Mesa's CPU driver: what a process takes, in children that load a model of a
quarter of a gigabyte and one of an eighth of its layers, which has the same kernels."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import vulkan_harness
from few_functions import few_functions

from mlc_amd.compiler import memory
from mlc_amd.compiler.codegen.target import make_target
from mlc_amd.compiler.gguf import synthetic
from mlc_amd.compiler.pipeline import compile_model
from mlc_amd.runtime.artifact.artifact import Artifact
from mlc_amd.runtime.artifact.memory import of_manifest
from mlc_amd.runtime.devices.vulkan.device import VulkanDevice
from mlc_amd.runtime.devices.vulkan.gpu import Heap
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.options import CompileOptions
from mlc_amd.tools import cli

MIB = 1 << 20
PROCESS = 400 * MIB  # more than Python, the libraries and the driver with its code take: 200 to 300 MiB
LAYERS, CTX = (2, 16), 128
CHILD = """
import json, re, sys

from mlc_amd.runtime.engine.engine import Engine


def resident(name="VmRSS"):
    return int(re.search(name + r":\\s+(\\d+)", open("/proc/self/status").read())[1]) << 10


engine = Engine.load(sys.argv[1])
peak, loaded = resident("VmHWM"), resident()
ids = [int(engine.decode(token).argmax()) for token in (3, 17, 9)]
ran = resident()
files = sum("safetensors" in line for line in open("/proc/self/maps"))
engine.close()
found = {"peak": peak, "loaded": loaded, "ran": ran, "closed": resident(), "maps": files, "ids": ids}
Engine.load(sys.argv[1]).close()
print(json.dumps(found | {"again": resident()}))
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The artifacts, the smaller one first."""
    vulkan_harness.gpu()
    found = [tmp_path_factory.mktemp("unified") / f"layers-{count}" for count in LAYERS]
    for folder, count in zip(found, LAYERS, strict=True):
        with wide(count) as model, few_functions():
            compile_model(model, folder, CompileOptions(target="vulkan", arch="lavapipe", ctx=CTX))
    return found


def wide(layers: int):
    sizes = {"block_count": layers, "embedding_length": 1024, "feed_forward_length": 4096}
    return synthetic("tiny:q8_0", keys=sizes)


def measured(folder) -> dict:
    child = subprocess.run([sys.executable, "-c", CHILD, folder], capture_output=True, text=True, timeout=600)
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout)


def needed(folder, capsys) -> int:
    """What `mlc-amd inspect` says, which is what the devices' blocks and the host's copies take."""
    capsys.readouterr()
    assert cli.main(["inspect", str(folder), "--json"]) == 0
    total = json.loads(capsys.readouterr().out)["memory"]["total"]
    assert total == of_manifest(Artifact.open(folder).manifest).in_host_memory().device()
    return total


def test_a_process_takes_what_inspect_says_and_has_the_weights_once(models, capsys):
    """More layers take as much more as inspect says, at most a hundredth of it is on top while they are loaded, and all
    of it is given back."""
    measured(models[0])  # compiles the shaders, which takes memory, for the others
    small, large = map(measured, models)
    need_small, need_large = (needed(folder, capsys) for folder in models)
    with wide(LAYERS[1]) as model, few_functions():
        estimate = memory.needs(model, make_target("vulkan", "lavapipe"), CTX).in_host_memory().device()
    assert estimate == pytest.approx(need_large, rel=0.05)
    more = need_large - need_small
    assert more > 180 * MIB
    for when in ("loaded", "ran"):
        assert large[when] - small[when] == pytest.approx(more, rel=0.05)
    assert 0 < small["ran"] - need_small < PROCESS
    assert large["peak"] - large["loaded"] < more / 100
    assert large["ran"] - large["closed"] > 0.95 * need_large and large["maps"] == 0
    assert large["again"] - large["closed"] < need_large / 2


def test_a_file_that_is_cut_off_while_it_is_read(models, tmp_path):
    folder = Path(shutil.copytree(models[0], tmp_path / "model"))
    artifact = Artifact.open(folder)
    os.truncate(folder / "weights.safetensors", 20 * MIB)
    with pytest.raises(UserError, match=r"weights.safetensors was cut off after it was opened; compile the"):
        VulkanDevice(artifact)
    with pytest.raises(UserError, match=r"weights.safetensors has \d+ bytes instead of \d+; compile the model again"):
        Artifact.open(folder)


def test_what_is_one_memory():
    """Heaps decide where a driver's type does not: a virtual machine's GPU."""
    gpu = vulkan_harness.gpu()
    own, host = Heap(1 << 30, 1 << 30, True), Heap(1 << 30, 1 << 30, False)
    for kind, heaps, unified in (
        ("integrated", (own, host), True),
        ("cpu", (own,), True),
        ("discrete", (own,), False),
        ("virtual", (own,), True),
        ("virtual", (own, host), False),
        ("other", (own, own), True),
    ):
        assert replace(gpu, type=kind, heaps=heaps).unified == unified
