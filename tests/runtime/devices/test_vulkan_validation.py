"""The vulkan device under Vulkan's validation layers, where these are installed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

LAYER = "VK_LAYER_KHRONOS_validation"
VALIDATION = {
    "VK_INSTANCE_LAYERS": LAYER,
    "VK_LAYER_ENABLES": "VK_VALIDATION_FEATURE_ENABLE_SYNCHRONIZATION_VALIDATION_EXT",
    "VK_LAYER_PRINTF_TO_STDOUT": "1",
}
COMPLAINTS = ("Validation Error", "Validation Warning", "VUID-", "SYNC-")


def python(code: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        env=os.environ | variables,
        timeout=300,
        check=False,
    )


def complaints(result: subprocess.CompletedProcess) -> list[str]:
    text = result.stdout + result.stderr
    return [line[:500] for line in text.splitlines() if any(word in line for word in COMPLAINTS)]


def test_the_validation_layers_stay_silent(compiled_for, tmp_path):
    if not any(
        list(Path(place, "vulkan/explicit_layer.d").glob("*validation*"))
        for place in ("/usr/share", "/etc", "/usr/local/share")
    ):
        pytest.skip(f"{LAYER} is not installed")
    wrong = (
        "from contextlib import ExitStack\nfrom mlc_amd.runtime.devices.vulkan.gpu import Instance\n"
        "from mlc_amd.runtime.devices.vulkan.context import Context\nfrom mlc_amd.runtime.devices.vulkan.memory "
        "import VulkanMemory\n"
        "i = Instance(); h = ExitStack(); c = Context(i, i.gpus[0], h); b = VulkanMemory(c).block(256, 'device')\n"
        "c.once(lambda commands: c.calls.vkCmdFillBuffer(commands, b.buffer, 0, 3, 0)); h.close(); i.close()"
    )
    variables = VALIDATION | {"XDG_CACHE_HOME": str(tmp_path)}
    assert complaints(python(wrong, **variables))  # so they do speak
    right = (
        "import sys\nfrom mlc_amd.runtime.engine.engine import Engine\n"
        "e = Engine.load(sys.argv[1]); e.decode(5)\n"  # which nobody closes
        "e = Engine.load(sys.argv[1]); e.score(range(1, 40)); [e.decode(5) for _ in range(5)]; e.time([1])\n"
        "[e.device.run('decode', dict) for _ in range(3)]; e.device.clear()\n"
        "e.device.pacer.limit = 1e-5; [e.decode(5) for _ in range(3)]; e.time([1]); e.time([1])\n"
        "e.device.copy_bandwidth(); e.device.close()\nprint('done')"
    )
    artifact = compiled_for("vulkan", "lavapipe", "tiny:q4_0", 128, few=True)
    result = python(right, str(artifact), **variables)
    assert "done" in result.stdout, result.stderr
    assert complaints(result) == []
