"""The power that a device takes while it runs, for `mlc-amd bench`.

In: which device runs, and the sensors of this machine: files below /sys, or NVIDIA's management library (NVML). Out:
`sensors` lists those of a device; a `Meter` reads them in a thread while its `with` block runs, and then has the mean
power in watts and the energy in joules.

A sensor tells either power, averaged by the device over some time, or energy since some time in the past.
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
# Seconds that a reading of power may look back: NVML documents 1 s for most GPUs, AMD documents nothing.
LAG = 1.0
LEAST = 2 * LAG  # seconds that a measurement takes at least


class NoSensor(Exception):
    """Nothing tells the power of a device; the message says why, and what to do."""


@dataclass(frozen=True)
class Sensor:
    """name: for people; read: watts, or joules of a counter (OSError when that fails); counter: whether it counts
    energy; range: joules after which a counter begins again at 0, None if it does not."""

    name: str
    read: Callable[[], float]
    counter: bool
    range: float | None = None


@dataclass(frozen=True)
class _Files:
    """A kind of sensor that Linux shows as files. device: "gpu" or "cpu"; pattern: of the files below /sys; begins: the
    beginning of the name in the file `name` beside it; range: a file beside it with the largest value of a counter,
    None for power. All values are in microwatts or microjoules."""

    device: str
    pattern: str
    begins: str = ""
    range: str | None = None


# Of each device, the first kind that can be read is used. Sources: docs.kernel.org, "amdgpu: hwmon" and "Power Capping
# Framework". amdgpu has one of its two files or both, depending on the GPU. A CPU's packages are without memory; other
# zones are parts of them.
_KINDS = (
    _Files("gpu", "bus/pci/devices/{pci}/hwmon/hwmon*/power1_average"),
    _Files("gpu", "bus/pci/devices/{pci}/hwmon/hwmon*/power1_input"),
    _Files("cpu", "class/powercap/intel-rapl:*/energy_uj", "package-", "max_energy_range_uj"),
)
# NVML's functions (nvml.h), in order of preference: type of the result, its unit in joules or watts, counter
_NVML: dict[str, tuple[Any, float, bool]] = {
    "nvmlDeviceGetTotalEnergyConsumption": (ctypes.c_ulonglong, 1e-3, True),
    "nvmlDeviceGetPowerUsage": (ctypes.c_uint, 1e-3, False),
}


def sensors(device, root: Path = SYS, nvml: str = NVML) -> list[Sensor]:
    """The sensors of a device of runtime/devices: their sum is its power. A GPU's is found by its PCI address. NoSensor
    if there are none, or this user may not read them. root: what is mounted at /sys; nvml: the library's name."""
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
        except OSError:  # amdgpu has files whose value some GPUs do not have
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
    """What a sensor calls itself, in the file `name` beside it."""
    label = file.with_name("name")
    return label.read_text().strip() if label.exists() else ""


def _of_file(kind: _Files, file: Path) -> Sensor:
    """OSError for a file that cannot be read."""

    def read(path: Path = file) -> float:
        return int(path.read_text()) * 1e-6

    read()
    limit = read(file.with_name(kind.range)) if kind.range else None
    return Sensor(f"{_name(file)} {file.name}", read, kind.range is not None, limit)


def _of_nvml(pci: str, library: str) -> Sensor | None:
    """The first of NVML's functions that works for a GPU; None without any. NVML stays open."""
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


Reading = tuple[float, float]  # seconds on some clock, what a sensor told


def mean_power(sensor: Sensor, readings: Sequence[Reading]) -> float | None:
    """Watts over the readings, in order of time; None for too few of them. Of a counter: the differences of all
    readings, since it may begin again at 0 in between. Of power: the mean of the readings that do not look back to the
    time before the first."""
    if len(readings) < 2 or readings[-1][0] <= readings[0][0]:
        return None
    start, end = readings[0][0], readings[-1][0]
    if sensor.counter:
        differences = [after - before for (_, before), (_, after) in pairwise(readings)]
        return sum(d + (sensor.range or 0.0) * (d < 0) for d in differences) / (end - start)
    settled = [watts for moment, watts in readings if moment >= start + LAG]
    return sum(settled) / len(settled) if settled else None


class Meter:
    """Reads sensors while a `with` block runs; without sensors it does nothing. watts: the mean of the sensors' sum,
    None before the end and where they told too little; seconds: the block's."""

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
        """Whether the block ran long enough for the sensors."""
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
            except OSError:  # a reading that fails, as when a GPU changes its state, is left out
                continue
            readings.append((time.perf_counter(), value))
