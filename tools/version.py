"""The output of `mlc-amd --version`: the versions of this program, of its compiler, and of what runs kernels here."""

import subprocess
from importlib import metadata
from pathlib import Path

import mlc_amd
from mlc_amd.runtime.errors import UserError


def text() -> str:
    """Lines: this program's version, with the commit if the installation is a git work tree; TVM's version if
    installed; the Vulkan devices with their drivers and the HIP runtime, if present."""
    tree = commit()
    lines = [f"mlc-amd {mlc_amd.__version__}" + (f" (commit {tree})" if tree else "")]
    tvm = next((one.version for one in metadata.distributions(name="apache-tvm")), None)
    lines += [f"TVM {tvm}"] if tvm else []
    return "\n".join([*lines, *_vulkan(), *_hip()]) + "\n"


def commit() -> str | None:
    """The commit of the git work tree from which this program runs, with "-dirty" if files were changed; None if there
    is none (an installed copy, or no git)."""
    root = Path(mlc_amd.__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def _vulkan() -> list[str]:
    from mlc_amd.runtime.devices.vulkan import api, gpu

    try:
        found = gpu.list_gpus()
    except (UserError, api.VulkanError):  # no loader, no driver, or no device: `mlc-amd doctor` reports which
        return []
    return [f"Vulkan {api.version_text(one.api)}: {one.name}, {one.driver}" for one in found]


def _hip() -> list[str]:
    from mlc_amd.runtime.devices.hip import api

    try:
        version = api.runtime_version(api.open_bindings())
    except UserError:  # not installed
        return []
    return [f"HIP {'.'.join(map(str, version))}"]
