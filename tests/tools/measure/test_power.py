"""Power: which sensors belong to a device, what their readings mean, and what the benchmark makes of them."""

import csv
import io
import json
import shutil
import subprocess
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import vulkan_harness

from mlc_amd.runtime.devices.vulkan import gpu
from mlc_amd.tools import cli
from mlc_amd.tools.measure import power

CPU = SimpleNamespace(kind="cpu")
ADDRESS = "0000:03:00.0"
NVML = """
#include <string.h>
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *address, void **gpu) {
  *gpu = (void *)0x1234567890;
  return strcmp(address, "0000:03:00.0") ? 6 : 0; /* NVML_ERROR_NOT_FOUND */
}
int nvmlDeviceGetTotalEnergyConsumption(void *gpu, unsigned long long *millijoules) {
  *millijoules = 5000000001234ull;
  return gpu != (void *)0x1234567890 ? 2 : COUNTS ? 0 : 3; /* NVML_ERROR_NOT_SUPPORTED */
}
int nvmlDeviceGetPowerUsage(void *gpu, unsigned *milliwatts) { *milliwatts = 71500; return 0; }
"""


def device(pci: str | None = ADDRESS, kind: str = "rocm") -> SimpleNamespace:
    return SimpleNamespace(kind=kind, gpu=SimpleNamespace(pci=pci, name="Radeon"))


def write(folder: Path, **values: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in values.items():
        (folder / name).write_text(f"{value}\n")
    return folder


@pytest.fixture
def tree(tmp_path) -> Path:
    """A /sys with two Radeons and a CPU of two packages."""
    devices, zones = tmp_path / "bus/pci/devices", tmp_path / "class/powercap"
    write(devices / ADDRESS / "hwmon/hwmon5", name="amdgpu", power1_average=101_000_000, power1_input=99_000_000)
    write(devices / "0000:83:00.0/hwmon/hwmon6", name="amdgpu", power1_input=37_000_000)
    write(zones / "intel-rapl:0", name="package-0", energy_uj=5_000_000, max_energy_range_uj=65_532_610_987)
    write(zones / "intel-rapl:0:0", name="core", energy_uj=4_000_000, max_energy_range_uj=65_532_610_987)
    write(zones / "intel-rapl:1", name="package-1", energy_uj=7_000_000, max_energy_range_uj=65_532_610_987)
    write(zones / "intel-rapl:2", name="psys", energy_uj=9_000_000, max_energy_range_uj=65_532_610_987)
    return tmp_path


# ---- which sensors


def test_a_radeon_has_the_sensor_at_its_address(tree):
    for kind in ("rocm", "vulkan"):
        (mean,) = power.sensors(device(kind=kind), tree)
        assert (mean.name, mean.read(), mean.counter) == ("amdgpu power1_average", 101, False)
    (moment,) = power.sensors(device("0000:83:00.0"), tree)
    assert (moment.name, moment.read()) == ("amdgpu power1_input", 37)
    mean = tree / "bus/pci/devices" / ADDRESS / "hwmon/hwmon5/power1_average"
    mean.unlink()
    mean.mkdir()  # a file that cannot be read
    assert [sensor.name for sensor in power.sensors(device(), tree)] == ["amdgpu power1_input"]


@pytest.mark.parametrize("one", [CPU, device(None, "vulkan")])
def test_a_cpu_has_the_counters_of_its_packages(tree, one):
    found = power.sensors(one, tree)
    assert [(s.name, s.read()) for s in found] == [("package-0 energy_uj", 5), ("package-1 energy_uj", 7)]
    assert all(s.counter and s.range == pytest.approx(65532.610987) for s in found)


@pytest.fixture(scope="module")
def nvml(tmp_path_factory):
    """nvml(counts) -> a library like NVIDIA's, whose GPU counts energy or does not."""
    compiler = shutil.which("cc") or pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("nvml")
    (folder / "nvml.c").write_text(NVML)

    def build(counts: bool) -> str:
        library = folder / f"libnvml-{counts}.so"
        command = [compiler, "-shared", "-fPIC", f"-DCOUNTS={counts:d}", "-o", str(library), str(folder / "nvml.c")]
        subprocess.run(command, check=True)
        return str(library)

    return build


def test_nvidias_library_tells_energy_or_else_power(nvml, tmp_path):
    (counter,) = power.sensors(device(), tmp_path, nvml(True))
    assert (counter.counter, counter.read()) == (True, pytest.approx(5000000001.234))
    (gauge,) = power.sensors(device(), tmp_path, nvml(False))
    assert (gauge.counter, gauge.read()) == (False, pytest.approx(71.5))
    with pytest.raises(power.NoSensor, match="0000:04"):
        power.sensors(device("0000:04:00.0"), tmp_path, nvml(True))


def test_what_there_is_without_a_sensor(tree, tmp_path, monkeypatch):
    absent = device("0000:99:00.0")
    for one, message in ((CPU, "modprobe"), (absent, "0000:99:00.0/hwmon, nor through"), (device(""), "Radeon does")):
        with pytest.raises(power.NoSensor, match=message):
            power.sensors(one, tmp_path / "none", "libno-such-nvml.so.1")
    read = Path.read_text

    def denied(path: Path) -> str:
        if path.name == "energy_uj":
            raise PermissionError
        return read(path)

    monkeypatch.setattr(Path, "read_text", denied)
    with pytest.raises(power.NoSensor, match=r"no permission on .*intel-rapl:0/energy_uj; run as root"):
        power.sensors(CPU, tree)


def test_vulkan_tells_a_gpus_address():
    facts = {"pciDomain": 1, "pciBus": 0xC3, "pciDevice": 0x1F, "pciFunction": 2}
    assert (gpu._pci(facts), gpu._pci({})) == ("0001:c3:1f.2", "")
    here = vulkan_harness.gpu()
    assert (here.pci is None) == (here.type == "cpu")


# ---- readings


def sensor(counter: bool, limit: float | None = None) -> power.Sensor:
    return power.Sensor("made up", lambda: 0.0, counter, limit)


def test_a_counter_may_begin_again_any_number_of_times():
    readings = [(10.0, 90.0), (11.0, 95.0), (12.0, 15.0), (13.0, 99.0), (14.0, 9.0)]  # 5, 20, 84, 10 joules
    assert power.mean_power(sensor(True, 100.0), readings) == pytest.approx(119 / 4)
    assert power.mean_power(sensor(True), readings[:2]) == pytest.approx(5)
    assert power.mean_power(sensor(True, 100.0), readings[:1]) is None


def test_power_from_before_the_measurement_does_not_count():
    readings = [(0.0, 10.0), (0.5, 20.0), (1.0, 100.0), (1.5, 110.0), (2.0, 120.0)]
    assert power.mean_power(sensor(False), readings) == pytest.approx(110)
    assert power.mean_power(sensor(False), readings[:2]) is None


def test_a_meter_adds_up_sensors_and_leaves_out_failed_readings(tree, monkeypatch):
    monkeypatch.setattr(power, "INTERVAL", 3600)  # seconds: it reads at the beginning and at the end
    with power.Meter(power.sensors(CPU, tree)) as meter:
        write(tree / "class/powercap/intel-rapl:1", energy_uj=1_000_000)  # less than before: it began again
    assert meter.watts and meter.watts > 0 and meter.joules == meter.watts * meter.seconds
    with power.Meter(power.sensors(device(), tree)) as meter:
        (tree / "bus/pci/devices" / ADDRESS / "hwmon/hwmon5/power1_average").unlink()
    assert meter.watts is None and meter.joules is None
    with power.Meter([]) as meter:
        assert meter.satisfied
    assert meter.watts is None


# ---- the benchmark


@pytest.fixture
def bench(compiled, capsys):
    """bench(*flags) -> what it prints to stdout and stderr."""

    def run(*flags: str) -> tuple[str, str]:
        assert cli.main(["bench", str(compiled("tiny:q4_0", 64)), "-p", "8", "-n", "2", "-r", "1", *flags]) == 0
        return capsys.readouterr()

    return run


def test_results_have_watts_and_joules_per_token(bench, monkeypatch):
    clock = power.Sensor("one watt", time.perf_counter, True)  # a joule per second
    monkeypatch.setattr(power, "sensors", lambda device: [clock, clock])
    monkeypatch.setattr(power, "LEAST", 0.5)
    lines, _ = bench("-o", "jsonl")
    for result in map(json.loads, lines.splitlines()):
        assert result["power_sensor"] == "one watt, one watt" and result["joules_per_token"] > 0
        assert result["power_w"] == pytest.approx(2, rel=0.5)
    (row, _) = csv.DictReader(io.StringIO(bench("-o", "csv")[0]))
    assert float(row["power_w"]) > 0 and float(row["joules_per_token"]) > 0
    head, _, line, _ = bench()[0].splitlines()
    shown = dict(zip(*([cell.strip() for cell in text.strip("|").split("|")] for text in (head, line)), strict=True))
    assert float(shown["W"]) > 0 and float(shown["J/token"]) > 0


def test_without_a_sensor_it_says_so_once(bench, monkeypatch, tmp_path):
    monkeypatch.setattr(power, "sensors", partial(power.sensors, root=tmp_path))
    table, said = bench()
    assert said.count("no energy counter of the CPU") == 1 and said.count("\n") == 2
    assert "J/token" not in table
    for result in map(json.loads, bench("-o", "jsonl")[0].splitlines()):
        assert [result[name] for name in ("power_sensor", "power_w", "joules_per_token")] == [None] * 3
