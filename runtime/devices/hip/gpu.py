"""Lists the GPUs that HIP reports, and chooses one, with the code object that it can run, for an artifact."""

import logging
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from mlc_amd.runtime.devices.choice import selected, selection
from mlc_amd.runtime.devices.hip.api import Hip, HipError, open_bindings, runtime_version
from mlc_amd.runtime.devices.hip.code_objects import SAME_ISA
from mlc_amd.runtime.devices.hip.diagnosis import why_no_gpu
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.host import kfd_gpus

log = logging.getLogger("mlc_amd")


@dataclass(frozen=True)
class HipGpu:
    """A GPU as reported by HIP. index: HIP's number. arch: such as "gfx1100". memory: bytes. integrated: whether it is
    an APU, which shares the host's memory. pci: its PCI address."""

    index: int
    name: str
    arch: str
    memory: int
    integrated: bool
    pci: str


def list_gpus(hip: Hip) -> list[HipGpu]:
    """The GPUs that HIP can use. Raises HipError if there are none."""
    return [_gpu(hip, index) for index in range(hip("hipGetDeviceCount"))]


def _gpu(hip: Hip, index: int) -> HipGpu:
    facts = hip("hipGetDeviceProperties", index)
    arch, name = (os.fsdecode(text).split("\0")[0] for text in (facts.gcnArchName, facts.name))
    pci = f"{facts.pciDomainID:04x}:{facts.pciBusID:02x}:{facts.pciDeviceID:02x}.0"
    arch = arch.split(":")[0]  # without ":sramecc+:xnack-"
    return HipGpu(index, name, arch, facts.totalGlobalMem, bool(facts.integrated), pci)


def sibling(arch: str, available: Collection[str]) -> str | None:
    """The arch in `available` whose code objects run on a GPU of `arch`: the same one, or one with the same instruction
    set; None if there is none."""
    if arch in available:
        return arch
    group = next((group for group in SAME_ISA if arch in group), {})
    return next((name for name in group if name in available), None)


def usable_gpus(hip: Hip, wanted: str | None) -> list[HipGpu]:
    """The GPUs that the user selects. wanted: see `choice.selected`. Raises UserError if there are none."""
    version = runtime_version(hip.names)
    try:
        gpus = list_gpus(hip)
    except HipError as e:
        raise UserError(why_no_gpu(e.code, version)) from e
    if not gpus:
        raise UserError(why_no_gpu("hipErrorNoDevice", version))
    return selected(gpus, wanted, "HIP")


def arch_here(wanted: str | None = None, bindings=None) -> str:
    """The arch of the GPU that the user selects; without a selection that of the first GPU that Linux reports, or
    "native" if it reports none. bindings: a substitute for AMD's package."""
    if selection(wanted):
        return usable_gpus(Hip(open_bindings() if bindings is None else bindings), wanted)[0].arch
    found = kfd_gpus()
    return found[0]["arch"] if found else "native"


def choose(hip: Hip, archs: Collection[str], wanted: str | None = None) -> tuple[HipGpu, str]:
    """(GPU, arch of the code object to load on it): the best of the GPUs that the user selects and that run code
    objects of these archs. GPUs of exactly such an arch come first, then discrete ones, then those with more memory.
    wanted: see `choice.selected`. Raises UserError if there is none."""
    gpus = usable_gpus(hip, wanted)
    usable = [(gpu, code) for gpu in gpus if (code := sibling(gpu.arch, archs))]
    if not usable:
        here = ", ".join(f"{gpu.arch} ({gpu.name})" for gpu in gpus)
        raise UserError(
            f"this model was compiled for {', '.join(archs)}, but this machine has {here}; "
            f"compile it with --target rocm --arch {gpus[0].arch}"
        )
    gpu, code = min(usable, key=lambda u: (u[0].arch != u[1], u[0].integrated, -u[0].memory, u[0].index))
    if gpu.arch != code:
        log.warning("using the kernels for %s on %s, which has the same instruction set", code, gpu.arch)
    return gpu, code


def with_free_memory(archs: Collection[str]) -> Iterator[tuple[HipGpu, int]]:
    """(GPU, bytes of free memory) of each GPU that runs code objects of these archs, the best first. Lazy, because HIP
    allocates some memory on a GPU when it is asked for the free memory."""
    hip = Hip(open_bindings())
    gpus = [gpu for gpu in usable_gpus(hip, "") if sibling(gpu.arch, archs)]
    for gpu in sorted(gpus, key=lambda gpu: (gpu.integrated, -gpu.memory, gpu.index)):
        hip("hipSetDevice", gpu.index)
        yield gpu, hip("hipMemGetInfo")[0]
