"""Measures a kit (candidates from `mlc-amd tune --export-kit`) on another machine. Needs only Python and numpy.

    kit.json      format 2, id, target, arch, model; candidates {name: {"reference", ..}}: reference is the untuned
                  kernel of the same workload ("" for the untuned kernel itself)
    candidates/   a folder for each candidate, as described in candidate.py
    copy/         for target vulkan: a candidate that copies memory, to measure the bandwidth
    lib/          these sources
    results.json  written here. It is rewritten after each result, so that an interrupted run can continue:
        format    2
        kit       the kit's id
        facts     {"device", "driver"}; with copy/ also "copy_bandwidth": bytes per second, read and written together
        results   {name: a result of measurer.py}
        checks    {name: {"checked": "device" or "lavapipe", "passed", "deviation", "error", "gain"}} of the candidates
                  that are faster than their reference

`mlc-amd tune --import-kit` reads the measurements from results.json and kit.json.
"""

import argparse
import json
import sys
import time
from pathlib import Path

from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.measure.candidate import figures, read
from mlc_amd.runtime.measure.measurer import Measurer

FORMAT = 2
KIT, RESULTS, CANDIDATES, COPY = "kit.json", "results.json", "candidates", "copy"


def _object(path: Path) -> dict | None:
    """The JSON object in a file; None if there is none."""
    try:
        found = json.loads(path.read_text()) if path.is_file() else None
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _are_candidates(found: object) -> bool:
    """Whether `found` is {name: {"reference": name or "", ..}}, where names are folders in one folder."""
    return isinstance(found, dict) and all(
        isinstance(entry, dict) and name.isprintable() and "/" not in name and entry.get("reference") in ("", *found)
        for name, entry in found.items()
    )


class KitRun:
    """A run that measures a kit. device: see `Measurer`."""

    def __init__(self, folder: Path, device: str | None = None):
        self.folder = folder
        kit = _object(folder / KIT)
        if kit is None:
            raise UserError(f"{folder} holds no readable {KIT}; make a kit with mlc-amd tune --export-kit")
        if kit.get("format") != FORMAT:
            raise UserError(f"{folder} was made by another version of mlc-amd; export the kit again")
        if not _are_candidates(kit.get("candidates")) or not isinstance(kit.get("id"), str):
            raise UserError(f"{folder / KIT} is damaged; copy the kit again")
        self.device, self.kit = device, kit
        self.candidates: dict[str, dict] = kit["candidates"]
        self.found = {"format": FORMAT, "kit": self.kit["id"], "facts": {}, "results": {}, "checks": {}}
        self._resume()
        self._started = time.monotonic()

    def _resume(self) -> None:
        """Loads the results of an earlier run. If their file is damaged, everything is measured again."""
        earlier = _object(self.folder / RESULTS)
        if (
            earlier
            and earlier.get("kit") == self.kit["id"]
            and all(
                isinstance(earlier.get(name), dict) and all(isinstance(one, dict) for one in earlier[name].values())
                for name in ("results", "checks")
            )
            and isinstance(earlier.get("facts"), dict)
        ):
            self.found |= {name: earlier[name] for name in ("facts", "results", "checks")}

    def all(self) -> None:
        """Measures, then compares, all remaining candidates. Raises UserError if there is no device for the kit."""
        groups: dict[str, list[str]] = {}
        for name, facts in self.candidates.items():
            groups.setdefault(facts["reference"] or name, []).append(name)
        with Measurer(self.device) as measurer:
            self._copy(measurer)
            for reference, names in groups.items():
                self._measure(measurer, reference, [name for name in names if name not in self.found["results"]])
                self._compare(measurer, reference, [name for name in names if name not in self.found["checks"]])

    def _copy(self, measurer: Measurer) -> None:
        """Measures the device's bandwidth with a copy kernel."""
        if (self.folder / COPY).is_dir() and not self.found["facts"]:
            (result,) = measurer.measure([self.folder / COPY])
            self.found["facts"] = dict(measurer.facts)
            if result["error"] is None:
                # of the fastest run, as in VulkanDevice
                rate = figures(read(self.folder / COPY).facts, min(result["runs"]))["gbps"]
                self.found["facts"]["copy_bandwidth"] = rate * 1e9
                print(f"{measurer.facts['device']} copies {rate:.1f} GB/s", flush=True)

    def _measure(self, measurer: Measurer, reference: str, names: list[str]) -> None:
        if not names:
            return
        # a continued run times the reference again, because clocks may differ; the reference's first result is kept
        folders = dict.fromkeys([reference, *names])

        def note(folder: str, result: dict) -> None:
            name = Path(folder).name
            if name in names:
                again = name in self.found["results"]
                self.found["results"][name] = result
                self.found["facts"] = measurer.facts | self.found["facts"]
                self._save()
                if not again:
                    self._print(name, result)

        measurer.measure([self._folder(name) for name in folders], note)

    def _compare(self, measurer: Measurer, reference: str, names: list[str]) -> None:
        """Compares the candidates that are faster than the reference with it. The others will not be used."""
        times = {name: self.found["results"][name].get("seconds") for name in (reference, *names)}
        for name in names:
            if name == reference or times[name] is None or not times[name] < (times[reference] or float("inf")):
                continue
            self.found["checks"][name] = measurer.compare(self._folder(reference), self._folder(name))
            self._save()

    def _folder(self, name: str) -> Path:
        return self.folder / CANDIDATES / name

    def _save(self) -> None:
        temporary = self.folder / f".{RESULTS}.tmp"
        temporary.write_text(json.dumps(self.found, indent=1))
        temporary.replace(self.folder / RESULTS)

    def _print(self, name: str, result: dict) -> None:
        done, total = len(self.found["results"]), len(self.candidates)
        if result["error"] is None:
            what = f"{result['us']:10.2f} us  {result['gbps']:8.1f} GB/s  {result['tflops']:7.2f} TFLOP/s"
        else:
            what = result["error"]
        print(f"[{done}/{total}] {time.monotonic() - self._started:5.0f} s  {name}  {what}", flush=True)

    def summary(self) -> str:
        failed = sum(result["error"] is not None for result in self.found["results"].values())
        wrong = sum(not check["passed"] for check in self.found["checks"].values())
        device = self.found["facts"].get("device", "nothing")
        done = f"{len(self.found['results'])} of {len(self.candidates)} measured on {device}"
        return f"{done}, {failed} failed; {len(self.found['checks'])} compared with untuned kernels, {wrong} wrong"


def main(folder: Path, arguments: list[str]) -> int:
    """The command line of a kit. Returns the exit code."""
    parser = argparse.ArgumentParser("run.py", description="Measures the kernels of this kit and writes results.json.")
    parser.add_argument("--device", help="the GPU: its number, or a part of its name")
    options = parser.parse_args(arguments)
    try:
        run = KitRun(folder, options.device)
        run.all()
    except UserError as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"stopped: {run.summary()}; run it again to resume", file=sys.stderr)
        return 130
    print(run.summary())
    if not any(result["error"] is None for result in run.found["results"].values()):
        print("error: no kernel could be measured: the lines above say why", file=sys.stderr)
        return 1
    print(f"take {folder / RESULTS} back into this folder where it was made, and: mlc-amd tune --import-kit FOLDER")
    return 0
