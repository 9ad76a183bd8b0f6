"""What Linux's amdgpu driver tells of the AMD GPUs of this machine: clocks and firmware, read from sysfs.

Files are those of the kernel's documentation (gpu/amdgpu: driver-misc, thermal); what is not there is left out.
"""

from pathlib import Path

CARDS = Path("/sys/class/drm")
AMD = "0x1002"
CLOCKS = {"sclk": "pp_dpm_sclk", "mclk": "pp_dpm_mclk"}  # of the shaders, of the memory


def cards(root: Path = CARDS) -> list[dict]:
    """{"card", "id", "pci", "vbios", "clocks": {name: {"levels": [MHz], "now": MHz or None}}, "level": of power
    management, "firmware": {name: version}} of each card of AMD's."""
    found = []
    for card in sorted(root.glob("card[0-9]*")):
        device = card / "device"
        if "-" in card.name or _text(device / "vendor") != AMD:
            continue
        clocks = {name: _clock(_text(device / file)) for name, file in CLOCKS.items()}
        firmware = {
            file.name.removesuffix("_fw_version"): _text(file)
            for file in sorted((device / "fw_version").glob("*_fw_version"))
        }
        found.append({
            "card": card.name,
            "id": _text(device / "device"),
            "pci": device.resolve().name,
            "vbios": _text(device / "vbios_version"),
            "level": _text(device / "power_dpm_force_performance_level"),
            "clocks": {name: clock for name, clock in clocks.items() if clock["levels"]},
            "firmware": {name: version for name, version in firmware.items() if version},
        })  # fmt: skip
    return found


def _text(file: Path) -> str | None:
    try:
        return file.read_text().strip() or None
    except OSError:  # not there, or not for this user
        return None


def _clock(text: str | None) -> dict:
    """Of lines such as "1: 2124Mhz *", where the asterisk is at the current level."""
    levels, now = [], None
    for line in (text or "").splitlines():
        _, _, rest = line.partition(":")
        digits = rest.strip().lower().partition("mhz")[0]
        if not digits.isdecimal():
            continue
        levels.append(int(digits))
        now = levels[-1] if rest.rstrip().endswith("*") else now
    return {"levels": levels, "now": now}
