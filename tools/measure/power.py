"""Measures the power of a device while it runs, for `mlc-amd bench`.

In: the running device, and this machine's sensors: files below /sys, or NVIDIA's management library (NVML). Out:
`sensors` lists the sensors of a device. A `Meter` reads them in a thread during its `with` block, and then has the mean
power in watts and the energy in joules.

A sensor reports either power, averaged by the device over some time, or a counter of energy.
"""

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

SYS = Path("/sys")
NVML = "libnvidia-ml.so.1"
INTERVAL = 0.05  # seconds between two readings
# How many seconds before a reading its power may be averaged over: NVML documents 1 s for most GPUs, AMD nothing.
LAG = 1.0
LEAST = 2 * LAG  # shortest measurement in seconds


class NoSensor(Exception):
    """The device has no sensor of power. The message says why, and what to do."""


@dataclass(frozen=True)
class Sensor:
    """name: for people. read: returns watts, or for a counter joules; raises OSError if it fails. counter: whether it
    counts energy. range: joules after which a counter begins again at 0, None if it does not."""

    name: str
    read: Callable[[], float]
    counter: bool
    range: float | None = None


@dataclass(frozen=True)
class _Files:
    """A kind of sensor that Linux shows as files. device: "gpu" or "cpu". pattern: of the files below /sys. begins: the
    beginning of the name in the file `name` next to it. range: a file next to it with the largest value of a counter,
    None for power. All values are in microwatts or microjoules."""

    device: str
    pattern: str
    begins: str = ""
    range: str | None = None


# For each device, the first kind that can be read is used. Sources: docs.kernel.org, "amdgpu: hwmon" and "Power Capping
# Framework". amdgpu has one of its two files or both, depending on the GPU. A CPU's packages do not include memory; the
# other zones are parts of them.
_KINDS = (
    _Files("gpu", "bus/pci/devices/{pci}/hwmon/hwmon*/power1_average"),
    _Files("gpu", "bus/pci/devices/{pci}/hwmon/hwmon*/power1_input"),
    _Files("cpu", "class/powercap/intel-rapl:*/energy_uj", "package-", "max_energy_range_uj"),
)
# NVML's functions (nvml.h), in order of preference: type of the result, its unit in joules or watts, whether it is a
# counter
_NVML: dict[str, tuple[Any, float, bool]] = {
    "nvmlDeviceGetTotalEnergyConsumption": (ctypes.c_ulonglong, 1e-3, True),
    "nvmlDeviceGetPowerUsage": (ctypes.c_uint, 1e-3, False),
}


def sensors(device, root: Path = SYS, nvml: str = NVML) -> list[Sensor]:
    """The sensors of a device of runtime/devices; their sum is its power. A GPU's sensors are found by its PCI address.
    Raises NoSensor if there are none, or if this user may not read them. root: what is mounted at /sys. nvml: the
    library's name."""
    if hasattr(device, "stages"):  # several GPUs
        several = {one.gpu.pci: one for one in device.stages}
        return [sensor for one in several.values() for sensor in sensors(one, root, nvml)]
    pci = None if device.kind == "cpu" else device.gpu.pci
    if pci == "":
        raise NoSensor(f"the driver of {device.gpu.name} does not tell its PCI address")
    for kind in (kind for kind in _KINDS if kind.device == ("cpu" if pci is None else "gpu")):
        matching = sorted(root.glob(kind.pattern.format(pci=pci)))
        files = [file for file in matching if _name(file).startswith(kind.begins)]
        try:
            found = [_of_file(kind, file) for file in files]
        except PermissionError as e:
            raise NoSensor(f"no permission on {files[0]}; run as root, or: sudo chmod o+r {files[0]}") from e
        except OSError:  # some GPUs have no value for this file of amdgpu
            continue
        if found:
            return found
    if pci is None:
        raise NoSensor(
            f"no energy counter of the CPU in {root / 'class/powercap'} (RAPL); try: sudo modprobe intel_rapl_msr; "
            "virtual machines have none"
        )
    if sensor := _of_nvml(pci, nvml):
        return [sensor]
    raise NoSensor(f"no power sensor in {root / 'bus/pci/devices' / pci / 'hwmon'}, nor through {nvml}")


def _name(file: Path) -> str:
    """A sensor's own name, from the file `name` next to it."""
    label = file.with_name("name")
    return label.read_text().strip() if label.exists() else ""


def _of_file(kind: _Files, file: Path) -> Sensor:
    """The sensor of a file. Raises OSError if it cannot be read."""

    def read(path: Path = file) -> float:
        return int(path.read_text()) * 1e-6

    read()
    limit = read(file.with_name(kind.range)) if kind.range else None
    return Sensor(f"{_name(file)} {file.name}", read, kind.range is not None, limit)


def _of_nvml(pci: str, library: str) -> Sensor | None:
    """A GPU's sensor, by the first of NVML's functions that works; None if none does. NVML stays open."""
    try:
        functions = ctypes.CDLL(library)
    except OSError:
        return None
    gpu = ctypes.c_void_p()
    if functions.nvmlInit_v2() or functions.nvmlDeviceGetHandleByPciBusId_v2(pci.encode(), ctypes.byref(gpu)):
        return None
    for name, (kind, unit, counter) in _NVML.items():
        read = partial(_read_nvml, getattr(functions, name), gpu, kind, unit)
        try:
            read()
        except OSError:  # older GPUs do not count energy
            continue
        return Sensor(name, read, counter)
    return None


def _read_nvml(function: Any, gpu: ctypes.c_void_p, kind: Any, unit: float) -> float:
    value = kind()
    if code := function(gpu, ctypes.byref(value)):
        raise OSError(f"{function.__name__} failed with NVML's error {code}")
    return value.value * unit


Reading = tuple[float, float]  # seconds on some clock, the sensor's value


def mean_power(sensor: Sensor, readings: Sequence[Reading]) -> float | None:
    """Watts over the readings, which are in order of time; None if there are too few. A counter: from the differences
    of all readings, as it may begin again at 0 in between. Power: the mean of the readings that are not averaged over
    time before the first one."""
    if len(readings) < 2 or readings[-1][0] <= readings[0][0]:
        return None
    start, end = readings[0][0], readings[-1][0]
    if sensor.counter:
        differences = [after - before for (_, before), (_, after) in pairwise(readings)]
        return sum(d + (sensor.range or 0.0) * (d < 0) for d in differences) / (end - start)
    settled = [watts for moment, watts in readings if moment >= start + LAG]
    return sum(settled) / len(settled) if settled else None


class Meter:
    """Reads sensors during a `with` block; without sensors it does nothing. watts: the mean of the sensors' sum; None
    before the end, and if there were too few readings. seconds: duration of the block."""

    def __init__(self, sensors: Sequence[Sensor]):
        self._readings: list[tuple[Sensor, list[Reading]]] = [(sensor, []) for sensor in sensors]
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.watts: float | None = None
        self.seconds = 0.0

    def __enter__(self) -> "Meter":
        self._start = time.perf_counter()
        if self._readings:
            self._read()
            self._thread.start()
        return self

    def __exit__(self, *raised) -> None:
        if self._readings:
            self._end.set()
            self._thread.join()
            self._read()
        self.seconds = time.perf_counter() - self._start
        found = [mean_power(sensor, readings) for sensor, readings in self._readings]
        told = [watts for watts in found if watts is not None]
        self.watts = sum(told) if told and len(told) == len(found) else None

    @property
    def satisfied(self) -> bool:
        """Whether the block was long enough for the sensors."""
        return not self._readings or time.perf_counter() - self._start >= LEAST

    @property
    def joules(self) -> float | None:
        return None if self.watts is None else self.watts * self.seconds

    def _watch(self) -> None:
        while not self._end.wait(INTERVAL):
            self._read()

    def _read(self) -> None:
        for sensor, readings in self._readings:
            try:
                value = sensor.read()
            except OSError:  # a failed reading is left out, for example when a GPU changes its state
                continue
            readings.append((time.perf_counter(), value))
