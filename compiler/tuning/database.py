"""Stores measurements of plans, and finds the best plans for a compile.

A folder for each arch, `<cache>/tuned/<arch>/`, where <cache> is `$XDG_CACHE_HOME/mlc-amd` or `~/.cache/mlc-amd`:

    arch.json            {"api", "arch"}: records of another arch are never used
    measurements.jsonl   a line for each measurement and each verification. A line is appended by one write, before the
                         result is used. Opening for tuning removes incomplete lines, which a killed process leaves,
                         and invalid lines (lines.py)

Records that the project ships are in `dist/tuned/<arch>.json`: the best plans of workloads whose best plan is not the
default.

A compile uses a plan if it was measured with the same version of TVM and of plans (`VERSION`), is in the current space
of the workload on the arch, and passed verification. If there are no records for a KV cache capacity, records for
another capacity are used. Unusable records are skipped with a note.
"""

import fcntl
import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import tvm

from mlc_amd.compiler.tuning import lines
from mlc_amd.runtime.artifact import json_files
from mlc_amd.runtime.closing import Closing
from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.operators import OPERATORS, VERSION, Operator, from_json
from mlc_amd.schedules.space import Space, space

MODES = ("none", "shipped", "user", "auto")
DEFAULT = "default"  # the source of plans that do not come from a record
LOG, HEADER, LOCK = "measurements.jsonl", "arch.json", "lock"
SHIPPED = Path(__file__).resolve().parents[2] / "dist" / "tuned"


@dataclass
class Measured:
    """The measurement of a plan.

    seconds     of a call; None if the kernel could not be built or run, then `error` has the reason
    runs        seconds of all repetitions
    device, driver, runner   where it was measured, and by which runner ("local", "rpc", "kit")
    """

    seconds: float | None
    error: str = ""
    runs: list[float] = field(default_factory=list)
    device: str = ""
    driver: str = ""
    runner: str = ""

    @classmethod
    def of(cls, result: Mapping[str, Any], **where: str) -> "Measured":
        """The measurement in a result of `Measurer`. where: device, driver, runner."""
        return cls(result.get("seconds"), result["error"] or "", result.get("runs", []), **where)


@dataclass
class Checked:
    """The verification of a plan's kernel against the kernel of the default plan.

    checked     where both kernels ran: "device", "lavapipe", "emulator"; "": nowhere, then `error` has the reason
    passed      whether their results agree; deviation: the largest error as a share of the tolerance
    gain        lower quartile of the speedup over the default plan in interleaved rounds; None: not timed
    """

    checked: str
    passed: bool
    deviation: float | None = None
    error: str = ""
    gain: float | None = None


@dataclass(kw_only=True)
class Record(Checked, Measured):
    """The record of a plan of a workload: its measurement and its verification. checked: "" if it was not verified.
    default: whether it is the default plan. over: the default plan to which `gain` refers. at: time of the measurement,
    seconds since 1970."""

    plan: dict
    checked: str = ""
    passed: bool = False
    default: bool = False
    over: dict | None = None
    at: float = 0

    @property
    def usable(self) -> bool:
        """Whether it ran, and its results are known to be right. Results of the default plan are the reference."""
        return self.seconds is not None and (self.default or self.passed)

    @property
    def refuted(self) -> bool:
        """Whether its results were wrong."""
        return bool(self.checked) and not self.passed


@dataclass
class WorkloadRecords:
    """A workload and its records, by plan."""

    workload: Operator
    records: dict[str, Record] = field(default_factory=dict)

    def refresh(self, found: Space | None) -> "WorkloadRecords":
        """Marks the default plan of the space `found` as the default; a former default becomes a plan like others.
        Returns itself."""
        if found:
            for record in self.records.values():
                record.default = record.plan == asdict(found.default)
        return self

    def seconds(self, record: Record) -> float | None:
        """The seconds of a call. If the plan has a gain over the current default plan from interleaved rounds, the time
        follows from this gain: the fastest of many single measurements is partly luck."""
        untuned = self.untuned
        if record.gain and not record.default and untuned and untuned.seconds and record.over == untuned.plan:
            return untuned.seconds / record.gain
        return record.seconds

    @property
    def ranked(self) -> list[Record]:
        """The usable records, the fastest first."""
        usable = [record for record in self.records.values() if record.usable]
        return sorted(usable, key=lambda record: self.seconds(record) or 0.0)

    @property
    def winner(self) -> Record | None:
        return next(iter(self.ranked), None)

    @property
    def untuned(self) -> Record | None:
        return next((record for record in self.records.values() if record.default), None)

    def known(self, found: Space) -> list[tuple[object, float | None]]:
        """(plan of the space, seconds) of the records that fit the space; seconds None for failed and wrong plans."""
        learned = {}
        for record in self.records.values():
            try:
                learned[found.equal(found.parse(record.plan))] = None if record.refuted else self.seconds(record)
            except ValueError:
                continue
        return list(learned.items())


def folder_of(arch) -> Path:
    """The folder of an arch in the user's cache of tuned plans."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "mlc-amd" / "tuned" / file_name(arch.name)


def file_name(arch_name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", arch_name)


def plan_text(plan: dict) -> str:
    return json.dumps(plan, separators=(",", ":"), sort_keys=True)


def entries(arch, folder: Path | None = None) -> dict[Operator, WorkloadRecords]:
    """The valid entries in an arch's folder, by default the user's. Another process may be tuning there."""
    return entries_of(lines.read((folder or folder_of(arch)) / LOG)[0])[0]


def stale(line: Mapping[str, Any]) -> str:
    """The reason why a line cannot be used by this version; "" if it can."""
    if line["tvm"] != tvm.__version__:
        return f"made with TVM {line['tvm']}, this is {tvm.__version__}"
    return "" if line.get("version", 0) == VERSION else "the kernels' plans have changed since"


def entries_of(found_lines: Iterable[Mapping[str, Any]]) -> tuple[dict[Operator, WorkloadRecords], list[str]]:
    """(the entries of the lines that can be used by this version, a note for each reason why other lines cannot).

    A line has {"op", "args", "version", "tvm"} and fields of a Record. A line without "seconds" updates the record of
    its plan.
    """
    found: dict[Operator, WorkloadRecords] = {}
    ignored = Counter[str]()
    for line in found_lines:
        if why := stale(line):
            ignored[why] += "seconds" in line
            continue
        workload = from_json(line)
        records = found.setdefault(workload, WorkloadRecords(workload)).records
        facts = {name: line[name] for name in Record.__dataclass_fields__ if name in line}
        plan = plan_text(line["plan"])
        if "seconds" in facts:
            records[plan] = Record(**facts)
        elif plan in records:
            vars(records[plan]).update(facts)
    return found, [f"{count} records ignored: {why}" for why, count in ignored.items()]


class Database(Closing):
    """The measurements of one arch, open for tuning by one process at a time. A context manager.

    folder: by default that of the arch in the user's cache. notes: lines that were removed, and why. Raises UserError
    if the folder belongs to another arch, or if another process has it open.
    """

    def __init__(self, arch, folder: Path | None = None):
        self.arch, self.folder = arch, folder or folder_of(arch)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = open(self.folder / LOCK, "w")  # noqa: SIM115 (closed by close())
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _check_header(self.folder, arch)
            _write(self.folder / HEADER, json.dumps({"api": arch.api, "arch": arch.name}) + "\n")
            good, self.notes = lines.read(self.folder / LOG)
            if self.notes:
                _write(self.folder / LOG, "".join(map(_line, good)))
            self.entries = entries_of(good)[0]
            self._file = os.open(self.folder / LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        except BaseException as e:
            self._lock.close()
            if isinstance(e, BlockingIOError):
                why = f"another process is tuning for {arch.name} ({self.folder}); wait for it or stop it"
                raise UserError(why) from None
            raise

    def close(self) -> None:
        os.close(self._file)
        self._lock.close()

    def entry(self, workload: Operator) -> WorkloadRecords:
        """The valid records of a workload. Records that are added later appear in it."""
        return self.entries.setdefault(workload, WorkloadRecords(workload)).refresh(space(workload, self.arch))

    def record(self, workload: Operator, plan: dict) -> Record:
        """The record of a plan. Raises KeyError for a plan that was not measured."""
        return self.entry(workload).records[plan_text(plan)]

    def add(self, workload: Operator, record: Record) -> Record:
        """Stores a measurement; it replaces one of the same plan. When this returns, it is in the file. Returns the
        stored record: for an invalid measurement, a record of a failure."""
        if why := lines.fault(self._about(workload) | asdict(record)):
            record = Record(None, f"its measurement makes no sense: {why}", runner=record.runner, plan=record.plan)
        self._append(workload, asdict(record))
        self.entry(workload).records[plan_text(record.plan)] = record
        return record

    def check(self, workload: Operator, plan: dict, found: Checked) -> Checked:
        """Stores a plan's verification, and returns it; an invalid one is stored as failed. Raises KeyError for a plan
        without a measurement."""
        record, choices = self.record(workload, plan), space(workload, self.arch)
        if why := lines.fault(self._about(workload) | {"plan": plan} | asdict(found)):
            found = Checked(found.checked, False, error=f"its verification makes no sense: {why}")
        facts = asdict(found) | {"over": asdict(choices.default) if choices and found.gain else None}
        self._append(workload, {"plan": plan} | facts)
        vars(record).update(facts)
        return found

    def _append(self, workload: Operator, facts: dict) -> None:
        os.write(self._file, _line(self._about(workload) | facts).encode())

    @staticmethod
    def _about(workload: Operator) -> dict[str, Any]:
        return {"op": workload.name, "args": workload.args, "version": VERSION, "tvm": tvm.__version__}


def _check_header(folder: Path, arch) -> None:
    if (folder / HEADER).exists():
        _check_arch(folder, json_files.read(folder / HEADER, lines.ArchLine, lines.ADVICE), arch)


def _check_arch(path: Path, found: Mapping[str, Any], arch) -> None:
    if (found["api"], found["arch"]) != (arch.api, arch.name):
        raise UserError(
            f"{path} holds records of {found['arch']:.80} ({found['api']:.80}), not of {arch.name} ({arch.api})"
        )


def _line(line: Mapping[str, Any]) -> str:
    return json.dumps(line, separators=(",", ":")) + "\n"


def _write(path: Path, text: str) -> None:
    """Replaces the file atomically."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


def shipped_lines(path: Path, arch) -> list[dict[str, Any]]:
    """The lines of a file of shipped records; [] if there is no file. Raises UserError for a damaged file, and for one
    of another arch."""
    if not path.exists():
        return []
    data = json_files.read(path, lines.Shipped, lines.ADVICE)
    _check_arch(path, data, arch)
    found = [{"tvm": data["tvm"], "version": data["version"]} | line for line in data["records"]]
    faults = [f"{path}, record {i}: {why}" for i, line in enumerate(found, 1) if (why := lines.fault(line))]
    if faults:
        raise UserError(f"{faults[0]}; {lines.ADVICE}")
    return found


class Lookup:
    """Finds the plans for a compile for one arch. Writes nothing.

    mode: one of MODES; "auto" takes the user's record, else the shipped one. notes: records that were skipped, and why.
    """

    def __init__(self, arch, mode: str = "auto", user: Path | None = None, shipped: Path | None = None):
        if mode not in MODES:
            raise UserError(f"--tuned {mode} is not one of {', '.join(MODES)}")
        self.arch, self.notes = arch, []
        self._found: dict[str, list[tuple[str, WorkloadRecords]]] = {}
        if mode in ("user", "auto"):
            self._add("user", self._user_lines, user or folder_of(arch))
        if mode in ("shipped", "auto"):
            self._add("shipped", shipped_lines, shipped or SHIPPED / f"{file_name(arch.name)}.json")

    def find(self, workload: Operator) -> tuple[object | None, str]:
        """(plan, "user" or "shipped"); (None, "default") stands for the kernel's default plan."""
        candidates = self._found.get(workload.key, [])
        found = space(workload, self.arch) if candidates else None

        def distance(pair: tuple[str, WorkloadRecords]) -> tuple:
            return pair[0] != "user", abs(math.log2(pair[1].workload.positions / workload.positions))

        for source, entry in sorted(candidates, key=distance):
            for record in entry.refresh(found).ranked:
                try:
                    if found is None:
                        raise ValueError("there is only one plan today")
                    plan = found.parse(record.plan)
                except ValueError as reason:
                    self.notes.append(f"{source} record of {workload.key} for {self.arch.name} ignored: {reason}")
                    continue
                return (None, DEFAULT) if record.default else (plan, source)
        return None, DEFAULT

    def _add(self, source: str, read, path: Path) -> None:
        try:
            found, notes = entries_of(read(path, self.arch))
            self.notes += [f"{source} records for {self.arch.name}: {note}" for note in notes]
            for entry in found.values():
                self._found.setdefault(entry.workload.key, []).append((source, entry))
        except UserError as error:
            self.notes.append(str(error))

    def _user_lines(self, folder: Path, arch) -> list[lines.Line]:
        _check_header(folder, arch)
        good, notes = lines.read(folder / LOG)
        self.notes += notes
        return good


def plans_hold(kernels: Iterable[Mapping[str, Any]], archs: Iterable[Any], mode: str) -> bool:
    """Whether a compile today would choose the same plans as those in a manifest's kernels."""
    for arch in archs:
        lookup = Lookup(arch, mode)
        for kernel in kernels:
            if kernel["operator"] in OPERATORS:
                plan: Any = lookup.find(from_json({"op": kernel["operator"], "args": kernel["args"]}))[0]
                had = kernel["tuned"][arch.name]["plan"]
                if (had is None) != (plan is None) or (plan and plan_text(asdict(plan)) != plan_text(had)):
                    return False
    return True
