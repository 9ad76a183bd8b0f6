"""Whether GPUs that share a model exchange parts while kernels run, or through copies between segments of a step."""

import logging
from collections.abc import Sequence
from contextlib import ExitStack

from mlc_amd.runtime.devices.exchange.check import Kernel, check, parts
from mlc_amd.runtime.devices.exchange.check_vulkan import CheckedVulkanGpu
from mlc_amd.runtime.devices.exchange.unsuitable import Unsuitable
from mlc_amd.runtime.devices.exchange.vulkan import RelayedBoxes
from mlc_amd.runtime.devices.vulkan import api
from mlc_amd.runtime.devices.vulkan.context import Context
from mlc_amd.runtime.devices.vulkan.gpu import Instance, choose
from mlc_amd.runtime.devices.vulkan.memory import VulkanMemory
from mlc_amd.runtime.exchange_layout import PROBE

ROUNDS = 4096  # of the check

log = logging.getLogger("mlc_amd")


def exchanges_inline(artifact, gpus: Sequence[int]) -> bool:
    """Of a part of the artifact on each of these GPUs, by number. Says in a line what was found."""
    if "exchange" not in artifact.manifest or artifact.manifest["target"]["kind"] != "vulkan":
        return False
    try:
        seconds = _round(artifact, gpus)
    except (Unsuitable, api.VulkanError) as e:
        log.info("GPUs exchange rows in copies between kernels: %s", e)
        return False
    log.info("GPUs exchange rows while kernels run, %.1f us each time", seconds * 1e6)
    return True


def _round(artifact, gpus: Sequence[int]) -> float:
    """Seconds of a round, after so many with right words. Unsuitable."""
    manifest = artifact.manifest
    exchange, target = manifest["exchange"], manifest["target"]
    needs = {profile: target["needs"][profile] for profile in target["archs"]}
    with ExitStack() as held:
        contexts, archs = [], []
        for gpu in gpus:
            instance = Instance()
            held.callback(instance.close)
            chosen, arch = choose(instance.gpus, needs, str(gpu))
            if chosen.type == "cpu":
                raise Unsuitable(f"{chosen.name} is a CPU, which other programs use, too")
            contexts.append(Context(instance, chosen, held))
            archs.append(arch)
        if len(set(archs)) > 1:
            raise Unsuitable("GPUs of different kinds")
        memories, relay = [VulkanMemory(one) for one in contexts], artifact.path / exchange["relay"]
        boxes = RelayedBoxes(memories, exchange["capacity"], relay)
        held.callback(boxes.close)
        (step,) = manifest["launches"][archs[0]][PROBE]["steps"]
        at, size = step["code"]
        code = (artifact.path / manifest["libraries"][archs[0]]).read_bytes()[at : at + size]
        grid, block, args = (tuple(step[key]) for key in ("grid", "block", "args"))
        kernel = Kernel(code, grid, block, args, 2 * exchange["words"][PROBE])
        needed = needs[archs[0]]
        given = parts(len(gpus), kernel.values)
        limits = needed["push_constants"], needed["subgroup_size"]
        ranks = [CheckedVulkanGpu(one, boxes, i, kernel, given[i], *limits) for i, one in enumerate(contexts)]
        return check(ranks, boxes, kernel.values, ROUNDS)
