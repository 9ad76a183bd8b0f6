"""Devices: what runs a plan. All of them do the same five things, so the engine knows none of them by name.

    Device(artifact, threads) -> checks that this machine can run the artifact, maps or uploads weights, allocates cache and arena
    .write(name, values)        fills the first part of an io buffer ("state", "tokens")
    .run(function)              runs one function of the plan and waits
    .read(name, rows)           the first rows of an io buffer as a numpy array, valid until the next run
    .clear()                    zeros the KV cache
"""

from mlc_amd.runtime.errors import UserError


def open_device(artifact, name: str | None = None, threads: int | None = None):
    """The device for an artifact's target. `name`: only the target's own kind is possible today. UserError if it cannot run here."""
    kind = artifact.manifest["target"]["kind"]
    if name not in (None, kind):
        raise UserError(f"this model was compiled for target '{kind}', not '{name}'; compile it with --target {name}")
    if kind == "cpu":
        from mlc_amd.runtime.devices.cpu import CpuDevice  # loads TVM's runtime library

        return CpuDevice(artifact, threads)
    if kind == "rocm":
        from mlc_amd.runtime.devices.hip import HipDevice

        return HipDevice(artifact, threads)
    raise UserError(f"this version has no device for target '{kind}'; compile the model with --target cpu")
