"""Decides whether the GPUs of a model exchange parts of a sum while kernels run, or by copies between the segments of a
step; makes the transport for the former."""

import logging
from collections.abc import Sequence
from typing import Any

from mlc_amd.runtime.devices.exchange import check_hip, check_vulkan
from mlc_amd.runtime.devices.exchange.hip import PeerBoxes
from mlc_amd.runtime.devices.exchange.unsuitable import Unsuitable
from mlc_amd.runtime.devices.exchange.vulkan import RelayedBoxes

ROUNDS = 4096  # rounds of the check
_CHECKS = {"rocm": check_hip.seconds_of_round, "vulkan": check_vulkan.seconds_of_round}

log = logging.getLogger("mlc_amd")


def exchanges_inline(artifact, gpus: Sequence[int]) -> bool:
    """Whether these GPUs, each with a part of the artifact, can exchange while kernels run. Runs the check on them, and
    logs its result. gpus: their numbers, in the order of ranks."""
    if "exchange" not in artifact.manifest:
        return False
    try:
        seconds = _CHECKS[artifact.manifest["target"]["kind"]](artifact, gpus, ROUNDS)
    except Unsuitable as e:
        log.info("GPUs exchange rows in copies between kernels: %s", e)
        return False
    log.info("GPUs exchange rows while kernels run, %.1f us each time", seconds * 1e6)
    return True


def boxes_between(artifact, devices: Sequence[Any]) -> PeerBoxes | RelayedBoxes:
    """The transport between open devices, in the order of ranks. Raises Unsuitable without memory for the boxes."""
    exchange = artifact.manifest["exchange"]
    if "relay" in exchange:
        memories = [device.memory for device in devices]
        return RelayedBoxes(memories, exchange["capacity"], artifact.path / exchange["relay"])
    return PeerBoxes(devices[0].hip, [device.gpu.index for device in devices], exchange["capacity"])
