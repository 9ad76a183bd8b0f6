"""Vulkan drivers that are installed and do not start: where they are looked for, and what is said about each."""

import json
import os
import shutil
import subprocess
from dataclasses import asdict
from pathlib import Path

import pytest
import vulkan_harness

from mlc_amd.runtime.devices.vulkan import drivers
from mlc_amd.tools.checks import machine
from mlc_amd.tools.commands import doctor

# A driver whose instances cannot be made, or whose devices cannot be listed, with Vulkan's codes for the reason.
DRIVER = """
#include <string.h>
static int create(const void *info, const void *allocator, void **made) { *made = (void *)8; return CREATE; }
static void destroy(void *instance, const void *allocator) {}
static int list(void *instance, unsigned *count, void **found) {
  *count = 0;
  return instance == (void *)8 ? LIST : -13;
}
void *vk_icdGetInstanceProcAddr(void *instance, const char *name) {
  return !strcmp(name, "vkCreateInstance") ? (void *)create
    : !instance ? 0
    : !strcmp(name, "vkEnumeratePhysicalDevices") ? (void *)list
    : !strcmp(name, "vkDestroyInstance") ? (void *)destroy : 0;
}
"""


@pytest.fixture
def build(tmp_path):
    """build(name, source, linked libraries) -> a shared library."""
    compiler = shutil.which("cc") or pytest.skip("no C compiler")

    def library(name: str, source: str, *linked: Path, **values: int) -> Path:
        (tmp_path / "source.c").write_text(source)
        defined = [f"-D{name}={value}" for name, value in values.items()]
        flags = ["-shared", "-fPIC", "-Wl,--no-as-needed", f"-Wl,-soname,{name}", *defined]
        place = tmp_path / name
        subprocess.run([compiler, *flags, "-o", place, tmp_path / "source.c", *linked], check=True)
        return place

    return library


@pytest.fixture
def manifest(tmp_path):
    """manifest(library) -> the file that names it."""

    def write(library: object, **more: str) -> Path:
        file = tmp_path / "nvidia_icd.json"
        file.write_text(json.dumps({"file_format_version": "1.0.0", "ICD": {"library_path": str(library)} | more}))
        return file

    return write


def test_a_missing_library_is_named_that_of_the_driver_or_one_that_it_needs(build, manifest, tmp_path):
    file = manifest("libGLX_no_such_driver.so.0")
    found = drivers.failure(file)
    assert found and found.missing == found.library == "libGLX_no_such_driver.so.0"
    needed = build("libNoSuchX11.so.6", "int x;")
    library = build("libdriver.so", DRIVER, needed, CREATE=0, LIST=0)
    needed.unlink()
    found = drivers.failure(manifest("./libdriver.so"))  # beside the manifest
    assert found and (found.missing, Path(found.library)) == ("libNoSuchX11.so.6", library)
    assert str(found).startswith(f"the Vulkan driver of {file} does not start: ./libdriver.so cannot be loaded (libNo")


@pytest.mark.parametrize(
    ("create", "devices", "reason"),
    [
        (-9, 0, "vkCreateInstance failed: VK_ERROR_INCOMPATIBLE_DRIVER"),
        (0, -3, "vkEnumeratePhysicalDevices failed: VK_ERROR_INITIALIZATION_FAILED"),
        (0, 0, None),
    ],
)
def test_the_call_that_fails_is_named(build, manifest, create, devices, reason):
    found = drivers.failure(manifest(build("libdriver.so", DRIVER, CREATE=create, LIST=devices)))
    assert (found and found.reason) == reason


def test_files_that_are_no_manifests_or_name_no_driver(build, manifest, tmp_path):
    found = drivers.failure(tmp_path / "absent.json")
    assert found and "cannot be read (No such file" in found.reason and not found.library
    for text in ("{", "[]", '{"ICD": {}}'):
        (tmp_path / "bad.json").write_text(text)
        found = drivers.failure(tmp_path / "bad.json")
        assert found and "is not a manifest" in found.reason
    found = drivers.failure(manifest(build("libother.so", "int x;")))
    assert found and "is not a Vulkan driver" in found.reason
    assert drivers.failure(manifest("libGLX_no_such_driver.so.0", library_arch="32")) is None


def test_a_driver_that_works_does_not_fail():
    vulkan_harness.gpu()
    assert drivers.manifests() and not drivers.failures()


def test_manifests_are_where_the_loader_looks(tmp_path):
    def put(path: str) -> Path:
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
        return file

    own, ours = put("home/.local/share/vulkan/icd.d/a.json"), put("share/vulkan/icd.d/b.json")
    one, two = put("more/1.json"), put("more/2.json")
    places = {"HOME": str(tmp_path / "home"), "XDG_DATA_DIRS": str(tmp_path / "share"), "XDG_CONFIG_DIRS": "/none"}
    system = sorted(Path("/etc/vulkan/icd.d").glob("*.json"))
    assert drivers.manifests(places) == [*system, own, ours]
    assert drivers.manifests(places | {"VK_ADD_DRIVER_FILES": str(one)}) == [one, *system, own, ours]
    forced = {"VK_ICD_FILENAMES": f"{one}{os.pathsep}/absent.json"}
    assert drivers.manifests(places | forced) == [one, Path("/absent.json")]
    assert drivers.manifests(places | forced | {"VK_DRIVER_FILES": str(one.parent)}) == [one, two]


# ---- doctor

NVIDIA = {"card": "card0", "vendor": "NVIDIA", "id": "0x2335", "driver": "nvidia", "node": "/dev/dri/renderD128"}
NVIDIA |= {"usable": True}
DEBIAN = ["debian"]


def facts(failed: list[drivers.Failure], distribution: list[str], devices: tuple = ()) -> dict:
    found = [asdict(one) | {"text": str(one)} for one in failed]
    manifests = ["/etc/vulkan/icd.d/nvidia_icd.json", "/usr/share/vulkan/icd.d/radeon_icd.x86_64.json"]
    vulkan = {"loader": True, "drivers": manifests, "devices": devices, "failed": found, "problem": "no driver; Mesa"}
    return {"vulkan": vulkan, "gpus": [NVIDIA], "distribution": distribution}


def failed(reason: str, missing: str = "", manifest: str = "nvidia_icd.json") -> drivers.Failure:
    return drivers.Failure(f"/etc/vulkan/icd.d/{manifest}", "libGLX_nvidia.so.0", reason, missing)


@pytest.mark.parametrize(
    ("failure", "distribution", "advice"),
    [
        (failed("x", "libX11.so.6"), DEBIAN, "sudo apt install libx11-6"),
        (failed("x", "libEGL.so.1"), ["ubuntu", "debian"], "sudo apt install libegl1"),
        (failed("x", "libX11.so.6"), ["fedora"], "sudo dnf install 'libX11.so.6()(64bit)'"),
        (failed("x", "libX11.so.6"), ["void"], "install the package that has libX11.so.6"),
        (failed("x", "libGLX_nvidia.so.0"), DEBIAN, "NVIDIA_DRIVER_CAPABILITIES=all"),
        (failed("vkCreateInstance failed"), DEBIAN, "nvidia-smi"),
        (drivers.Failure("/none.json", "", "the file cannot be read"), DEBIAN, "VK_ICD_FILENAMES"),
    ],
)
def test_a_driver_that_fails_is_named_with_what_it_lacks(failure, distribution, advice):
    *_, (status, what, found) = doctor.judge(facts([failure], distribution))
    assert (status, what) == ("problem", f"target vulkan: {failure}") and advice in found and "mesa" not in found


def test_without_a_visible_gpu_the_manifest_tells_the_vendor():
    *_, (status, _, advice) = doctor.judge(facts([failed("vkCreateInstance failed")], DEBIAN) | {"gpus": []})
    assert status == "missing" and "nvidia-smi" in advice


def test_only_the_driver_of_the_gpu_matters():
    llvmpipe = {"index": 0, "name": "llvmpipe", "type": "cpu", "vendor": "0x10005", "driver": "lvp", "api": "1.3.0"}
    llvmpipe |= {"memory": 1 << 30, "host_memory": 0, "profile": "lavapipe", "lacks": []}
    other = failed("x", "libLLVM.so", "radeon_icd.x86_64.json")
    mine = failed("vkCreateInstance failed")
    _, cpu, problem = doctor.judge(facts([other, mine], DEBIAN, (llvmpipe,)))
    assert cpu[0] == "ok" and problem[1] == f"target vulkan: {mine}"
    _, _, (_, what, advice) = doctor.judge(facts([other], DEBIAN, (llvmpipe,)))
    assert "does not show the NVIDIA GPU" in what and "nvidia_icd.json) is installed and finds no GPU" in advice


def test_the_failed_drivers_of_this_machine_are_facts(manifest, monkeypatch):
    if not machine.vulkan()["loader"]:
        pytest.skip("no Vulkan loader")
    file = manifest("libGLX_no_such_driver.so.0")
    monkeypatch.setenv("VK_DRIVER_FILES", str(file))
    monkeypatch.setenv("VK_ICD_FILENAMES", str(file))
    found = machine.vulkan()
    assert found["problem"].startswith(f"the Vulkan driver of {file} does not start: libGLX_no_such_driver.so.0 cannot")
    assert [one["missing"] for one in found["failed"]] == ["libGLX_no_such_driver.so.0"]
