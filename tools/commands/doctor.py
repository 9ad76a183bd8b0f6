"""`mlc-amd doctor`: what this machine can compile for and run on, and what to do about what is missing.

It also works without the compiler and TVM, on machines that only run compiled models. Then it reports this and leaves
out what concerns them.
"""

import platform
import sys
from collections.abc import Iterator
from json import dumps

from mlc_amd.runtime import extras
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.folders import cache_directory, temporary
from mlc_amd.runtime.options import CompileOptions
from mlc_amd.tools.checks import doctor_vulkan, machine
from mlc_amd.tools.checks.doctor_vulkan import Check
from mlc_amd.tools.measure import bandwidth
from mlc_amd.tools.options import Json
from mlc_amd.tools.terminal import display

_OLDEST_PYTHON = (3, 11)


def run(*, json: Json = False) -> None:
    """Shows what this machine can compile for and run on. Exits with 0 when the cpu target works, or nothing can be
    compiled here at all.
    """
    facts = {
        "python": platform.python_version(),
        "packages": machine.packages(),
        "tvm": machine.tvm(),
        "cpu": machine.cpu() | {"read_bytes_per_second": bandwidth.measure()},
        "gpus": machine.gpus(),
        "kfd": machine.kfd(),
        "rocm": machine.rocm(),
        "vulkan": machine.vulkan(),
        "distribution": machine.distribution(),
        "cache": _cache_facts(),
    }
    if facts["tvm"]:
        facts |= {"extras": extras.extras(), "linkers": machine.linkers()}
    if "error" in facts["tvm"]:
        facts["cpu_target"] = "TVM does not load"
    elif facts["tvm"]:
        facts |= {"cpu_target": _try_cpu_target(), "rocm_linker": machine.rocm_linker()}
    checks = judge(facts)
    if json:
        told = [{"status": status, "what": what, "advice": advice} for status, what, advice in checks]
        print(dumps(facts | {"checks": told}, indent=1))
    else:
        for status, what, advice in checks:
            print(f"{_MARKS[status]} {what}" + (f"\n      {advice}" if advice else ""))
    if facts.get("cpu_target") is not None:
        raise UserError(f"the cpu target does not work here: {facts['cpu_target']}")


def judge(facts: dict[str, object]) -> list[Check]:
    """The checks that follow from the facts. Unknown facts may be left out."""
    return [check for fact, part in _PARTS.items() if fact in facts for check in part(facts)]


_MARKS = {"ok": "[ok]", "missing": "[--]", "problem": "[!!]"}


def _try_cpu_target() -> str | None:
    """Compiles a tiny model for this CPU, loads it and computes a token. Returns what went wrong, or None."""
    import numpy as np

    from mlc_amd.compiler.gguf.synthetic import synthetic
    from mlc_amd.compiler.pipeline import compile_model
    from mlc_amd.runtime.engine.engine import Engine

    display.message("compiling and running a test model ...")
    with temporary("doctor") as directory:
        place = directory / "model"
        try:
            compile_model(synthetic("tiny:q4_0"), place, CompileOptions(target="cpu", ctx=64))
            finite = bool(np.isfinite(Engine.load(place).decode(1)).all())
        except Exception as error:  # the purpose is to report whatever fails
            return f"{type(error).__name__}: {error}"
    return None if finite else "a test model computed numbers that are not finite"


def _cache_facts() -> dict[str, object]:
    place = cache_directory()
    files = [file.stat() for file in place.rglob("*") if file.is_file()]
    # models share weights through links to one file
    return {"path": str(place), "bytes": sum({status.st_ino: status.st_size for status in files}.values())}


def _python(facts: dict) -> Iterator[Check]:
    good = sys.version_info[:2] >= _OLDEST_PYTHON
    advice = "" if good else f"install Python {'.'.join(map(str, _OLDEST_PYTHON))} or newer"
    what = f"Python {facts['python']} on {platform.system()} {platform.machine()}"
    yield "ok" if good else "problem", what, advice


def _packages(facts: dict) -> Iterator[Check]:
    bad = [package for package in facts["packages"] if not package["ok"]]
    if facts["packages"] and not bad:
        yield "ok", f"{len(facts['packages'])} required packages are installed in the right versions", ""
    for p in bad:
        what = f"package {p['name']} {p['found'] or 'is not installed'}"
        yield "problem", what, f"pip install '{p['name']}{p['wanted']}'"


def _extras(facts: dict) -> Iterator[Check]:
    for found in facts["extras"]:
        if found["missing"]:
            lacks = ", ".join(f"{name} (for {purpose})" for name, purpose in found["missing"].items())
            yield "missing", f"extra {found['extra']} lacks {lacks}", extras.install(found["extra"])
        else:
            yield "ok", f"extra {found['extra']} is installed: {', '.join(found['packages'])}", ""


def _tvm(facts: dict) -> Iterator[Check]:
    found = facts["tvm"]
    if not found:
        yield (
            "missing",
            "no compiler: this installation runs compiled models only",
            "to compile, install mlc-amd from a checkout of it: pip install .",
        )
    elif "error" in found:
        again = "pip install --force-reinstall apache-tvm==0.27.0.post1"
        yield "problem", f"TVM does not load: {found['error']}", again
    else:
        targets = ", ".join(name for name, present in (("x86", found["x86"]), ("AMDGPU", found["amdgpu"])) if present)
        what = f"TVM {found['version']} with LLVM {found['llvm']}: {targets} (loads in {found['seconds']} s)"
        yield "ok", what, ""


def _linker(facts: dict) -> Iterator[Check]:
    usable = [name for name in ("cc", "gcc", "clang", "ziglang") if facts["linkers"][name]]
    if usable:
        yield "ok", f"linker for cpu kernels: {usable[0]}", ""
    else:
        yield "problem", "no C compiler to link cpu kernels", "install gcc or clang, or: pip install ziglang"


def _cpu(facts: dict) -> Iterator[Check]:
    cpu = facts["cpu"]
    memory = f"{display.size(cpu['memory'])} of memory ({display.size(cpu['available'])} free)"
    isa = " ".join(cpu["isa"]) or "no vector extensions known"
    yield "ok", f"CPU {cpu['name']}, {cpu['cores']} cores, {isa}", ""
    yield "ok", f"{memory}, read at {cpu['read_bytes_per_second'] / 1e9:.1f} GB/s", ""


def _cpu_target(facts: dict) -> Iterator[Check]:
    if facts["cpu_target"] is None:
        yield "ok", "target cpu: a test model compiles, loads and computes", ""
    else:
        yield "problem", f"target cpu: {facts['cpu_target']}", "mend what is marked above; --debug shows more"


def _gpus(facts: dict) -> Iterator[Check]:
    if not facts["gpus"]:
        yield "missing", "no GPU in /sys/class/drm", "models run on the CPU; in a container, pass --device /dev/dri"
    for gpu in facts["gpus"]:
        what = f"GPU {gpu['card']}: {gpu['vendor']} {gpu['id']}, driver {gpu['driver'] or 'none'}"
        if gpu["node"] is None:
            yield "missing", what, "it has no render node: load its kernel driver (AMD: amdgpu)"
        elif not gpu["usable"]:
            yield "problem", what, f"you may not open {gpu['node']}: {_JOIN}"
        else:
            yield "ok", what, ""


_JOIN = "sudo usermod -aG render $USER, then log in again"


def _kfd(facts: dict) -> Iterator[Check]:
    if facts["kfd"]["usable"]:
        yield "ok", "/dev/kfd: ROCm programs can use the GPU", ""
    elif facts["kfd"]["present"]:
        yield "problem", "/dev/kfd is here but not for you", _JOIN
    else:
        advice = "load the kernel driver amdgpu; in a container, pass --device /dev/kfd"
        yield "missing", "no /dev/kfd: no AMD GPU for ROCm", advice


def _rocm(facts: dict) -> Iterator[Check]:
    rocm = facts["rocm"]
    if rocm["runtime"]:
        yield "ok", f"HIP runtime {rocm['runtime']} (rocm-bindings-hip {rocm['bindings']})", ""
    if rocm["problem"]:  # only a problem if there is a GPU that could be used
        what, _, advice = rocm["problem"].partition("; ")
        yield "problem" if rocm["chips"] else "missing", f"target rocm cannot run here: {what}", advice
    for gpu in rocm["gpus"]:
        what = f"{'APU' if gpu['integrated'] else 'GPU'} {gpu['name']}, {gpu['arch']}, {display.size(gpu['memory'])}"
        yield "ok", f"target rocm: device {gpu['index']}, {what}", ""
    if rocm["override"]:
        chips = ", ".join(chip["arch"] for chip in rocm["chips"]) or "unknown"
        yield "ok", f"HSA_OVERRIDE_GFX_VERSION={rocm['override']} is set; the chip is {chips}", ""


def _rocm_linker(facts: dict) -> Iterator[Check]:
    found = facts["rocm_linker"]
    if found["problem"] is None:
        yield "ok", f"linker for rocm kernels: {found['command']}", ""
    else:
        what, _, advice = found["problem"].partition("; ")
        yield "missing", f"cannot compile for target rocm: {what}", advice


def _cache(facts: dict) -> Iterator[Check]:
    place, size = facts["cache"]["path"], display.size(facts["cache"]["bytes"])
    yield "ok", f"compiled models are kept in {place} ({size}), which may be deleted any time", ""


# By the fact that each part needs, in the order of the report.
_PARTS = {
    "python": _python,
    "packages": _packages,
    "extras": _extras,
    "tvm": _tvm,
    "linkers": _linker,
    "cpu": _cpu,
    "cpu_target": _cpu_target,
    "gpus": _gpus,
    "kfd": _kfd,
    "rocm": _rocm,
    "rocm_linker": _rocm_linker,
    "vulkan": doctor_vulkan.judge,
    "cache": _cache,
}
