"""doctor: what it advises for what is missing, and that it works without the compiler and without any Vulkan."""

import importlib.metadata
import importlib.util
import json

import numpy as np
import pytest

from mlc_amd.runtime.devices.vulkan import api
from mlc_amd.tools import cli
from mlc_amd.tools.checks import machine
from mlc_amd.tools.commands import doctor

DECK = {
    "index": 0,
    "name": "AMD Custom GPU 0405 (RADV VANGOGH)",
    "type": "integrated",
    "vendor": "0x1002",
    "driver": "radv Mesa 25.1",
    "api": "1.4.311",
    "host_memory": 0,
    "memory": 8 << 30,
    "profile": "vangogh",
    "lacks": ["cooperative matrices of 16x16x16"],
}
LLVMPIPE = DECK | {"name": "llvmpipe", "type": "cpu", "vendor": "0x10005", "profile": "lavapipe"}
FACTS = {
    "python": "3.11.7",
    "packages": [{"name": "numpy", "wanted": "", "found": "2.0", "ok": True}],
    "extras": [{"extra": "rocm", "packages": ["ziglang"], "missing": {}}],
    "tvm": {"version": "0.27", "llvm": 22, "amdgpu": True, "x86": True, "seconds": 1.0},
    "linkers": {"cc": None, "gcc": "/usr/bin/gcc", "clang": None, "ld.lld": None, "ziglang": None},
    "cpu": {
        "name": "Zen",
        "cores": 2,
        "isa": ["AVX2"],
        "memory": 8 << 30,
        "available": 4 << 30,
        "read_bytes_per_second": 3e10,
    },
    "gpus": [
        {
            "card": "card0",
            "vendor": "AMD",
            "id": "0x744c",
            "driver": "amdgpu",
            "node": "/dev/dri/renderD128",
            "usable": True,
        }
    ],
    "kfd": {"present": True, "usable": True},
    "vulkan": {"loader": True, "drivers": ["radeon_icd.x86_64.json"], "devices": [DECK], "failed": [], "problem": None},
    "distribution": ["steamos", "arch"],
    "cpu_target": None,
    "cache": {"path": "/home/me/.cache/mlc-amd", "bytes": 0},
}
NO_VULKAN = {"loader": False, "drivers": [], "devices": [], "failed": [], "problem": "cannot load it"}


def vulkan(**changes) -> dict:
    return {"vulkan": FACTS["vulkan"] | changes}


@pytest.mark.parametrize(
    ("change", "status", "advice"),
    [
        (
            {"packages": [{"name": "numpy", "wanted": ">=2", "found": "1.26", "ok": False}]},
            "problem",
            "pip install 'numpy>=2'",
        ),
        (
            {"extras": [{"extra": "tune", "packages": [], "missing": {"xgboost": "the search"}}]},
            "missing",
            "pip install 'mlc-amd[tune]'",
        ),
        ({"tvm": {"error": "OSError: libz"}}, "problem", "reinstall apache-tvm"),
        ({"tvm": {}}, "missing", "from a checkout of it: pip install ."),
        ({"linkers": dict.fromkeys(FACTS["linkers"])}, "problem", "ziglang"),
        ({"gpus": [FACTS["gpus"][0] | {"usable": False}]}, "problem", "usermod -aG render"),
        ({"gpus": [FACTS["gpus"][0] | {"node": None}]}, "missing", "amdgpu"),
        ({"gpus": []}, "missing", "/dev/dri"),
        ({"kfd": {"present": True, "usable": False}}, "problem", "usermod -aG render"),
        ({"kfd": {"present": False, "usable": False}}, "missing", "/dev/kfd"),
        ({"vulkan": NO_VULKAN}, "problem", "sudo pacman -S vulkan-icd-loader vulkan-radeon"),
        (
            {"vulkan": NO_VULKAN, "distribution": ["ubuntu", "debian"]},
            "problem",
            "sudo apt install libvulkan1 mesa-vulkan-drivers",
        ),
        ({"vulkan": NO_VULKAN, "distribution": []}, "problem", "your distribution's packages"),
        (vulkan(drivers=[], devices=[], problem="none"), "problem", "vulkan-radeon"),
        (
            vulkan(devices=[], problem="no Vulkan device: no permission on /dev/dri/renderD128; join its group"),
            "problem",
            "join its group",
        ),
        (vulkan(drivers=["lvp_icd.json"], devices=[LLVMPIPE]), "problem", "vulkan-radeon"),
        (vulkan(devices=[DECK | {"profile": "rdna3:matrix=none"}]), "missing", "update Mesa"),
        (vulkan(devices=[DECK | {"vendor": "0x10de", "profile": "generic"}]), "missing", "update NVIDIA's driver"),
    ],
)
def test_it_says_what_to_do_about_what_is_missing(change, status, advice):
    assert {found for found, _, _ in doctor.judge(FACTS)} == {"ok"}
    (found,) = [check for check in doctor.judge(FACTS | change) if check[0] != "ok"]
    assert found[0] == status and advice in found[2]


def test_without_a_gpu_no_vulkan_is_no_problem_and_nvidia_gets_its_own_advice():
    *_, found = doctor.judge({"vulkan": NO_VULKAN, "gpus": []})
    assert found[0] == "missing" and "libvulkan.so.1" in found[1]
    _, found = doctor.judge({"vulkan": NO_VULKAN, "gpus": [FACTS["gpus"][0] | {"vendor": "NVIDIA"}]})
    assert found[0] == "problem" and "NVIDIA_DRIVER_CAPABILITIES" in found[2]


def test_a_device_is_told_with_driver_memory_and_profile():
    (found,) = doctor.judge(vulkan())
    assert found[0] == "ok" and found[1].startswith(
        "target vulkan: device 0, APU AMD Custom GPU 0405 (RADV VANGOGH), 8.00 GiB, "
    )
    assert found[1].endswith("profile vangogh (radv Mesa 25.1, Vulkan 1.4.311)")
    (card,) = doctor.judge(vulkan(devices=[DECK | {"type": "discrete", "host_memory": 31 << 30}]))
    assert "8.00 GiB (and 31.00 GiB of the host's for experts), profile" in card[1]


def test_where_only_compiled_models_run_it_leaves_compiling_out(monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "mlc_amd.compiler" else find(name, *more)
    )

    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(machine.metadata, "requires", absent)
    assert cli.main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["packages"] == [] and not {"cpu_target", "linkers", "rocm_linker"} & report.keys()
    assert any(check["what"].startswith("no compiler:") for check in report["checks"])


def test_without_the_loader_vulkan_is_absent_with_a_reason(monkeypatch):
    monkeypatch.setattr(api, "LIBRARY", "libno-such-vulkan.so.1")
    found = machine.vulkan()
    assert not found["loader"] and not found["devices"] and "libno-such-vulkan.so.1" in found["problem"]


def test_without_a_driver_the_loader_is_there_and_no_device(monkeypatch, tmp_path):
    if not machine.vulkan()["loader"]:
        pytest.skip("no Vulkan loader")
    for variable in ("VK_DRIVER_FILES", "VK_ICD_FILENAMES"):
        monkeypatch.setenv(variable, str(tmp_path / "none.json"))
    found = machine.vulkan()
    assert found["loader"] and found["devices"] == [] and "none.json does not start" in found["problem"]


def test_package_versions_are_compared_with_the_wanted_ones(monkeypatch):
    by_name = {package["name"]: package for package in machine.packages()}
    assert by_name["apache-tvm"]["ok"] and by_name["apache-tvm"]["wanted"].startswith("==") and "pytest" not in by_name
    monkeypatch.setattr(
        machine.metadata, "requires", lambda _: ["numpy>=1000", "no-such-package-here", "pytest; extra == 'test'"]
    )
    numpy, absent = machine.packages()
    assert (numpy["ok"], numpy["found"]) == (False, np.__version__)
    assert (absent["name"], absent["ok"], absent["found"]) == ("no-such-package-here", False, None)


def test_clocks_and_firmware(tmp_path):
    """A made-up tree as amdgpu shows it; another vendor's card, a connector and missing files do not count."""
    device = tmp_path / "card1" / "device"
    (device / "fw_version").mkdir(parents=True)
    (tmp_path / "card1-DP-1").mkdir()
    (tmp_path / "card0" / "device").mkdir(parents=True)
    (tmp_path / "card0" / "device" / "vendor").write_text("0x8086\n")
    for name, text in {
        "vendor": "0x1002\n",
        "device": "0x744c\n",
        "vbios_version": "113-D70401XT\n",
        "power_dpm_force_performance_level": "auto\n",
        "pp_dpm_sclk": "0: 500Mhz\n1: 2124Mhz *\n2: 2482Mhz\n",
        "fw_version/mec_fw_version": "0x00000216\n",
        "fw_version/smc_fw_version": "0x004e8100\n",
    }.items():
        (device / name).write_text(text)
    (card,) = machine.amd_cards(tmp_path)
    assert card["clocks"] == {"sclk": {"levels": [500, 2124, 2482], "now": 2124}}
    assert card["firmware"] == {"mec": "0x00000216", "smc": "0x004e8100"}
    assert (card["card"], card["id"], card["vbios"], card["level"]) == ("card1", "0x744c", "113-D70401XT", "auto")
    assert machine.amd_cards(tmp_path / "none") == []
