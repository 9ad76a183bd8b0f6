"""Where measurements are kept, and how a compile finds the winners.

A folder for each arch, `<cache>/tuned/<arch>/`, where <cache> is `$XDG_CACHE_HOME/mlc-amd` or `~/.cache/mlc-amd`:

    arch.json                       {"api", "arch"}: records of another arch are never taken
    measurements.jsonl              a line for each measurement and for each check, appended as they are made
    database_workload.json,         the same measurements as MetaSchedule's JSONDatabase
    database_tuning_record.json

A measurement's line goes out in one write before anything else is done with it; opening drops a line that a killed
process tore, and adds to MetaSchedule's files what they lack. Records shipped with the project are
`dist/tuned/<arch>.json`, winners only, default plans among them where no other is known to be better.

A plan is used when it was measured with this version of TVM, for a workload whose reference has the same hash today,
still fits the arch, and passed its numeric check. What does not is left aside with a note.
"""

import fcntl
import json
import os
import re
from collections.abc import Container, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import tvm

from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.tuning.spaces import as_dict, space
from mlc_amd.schedules.tuning.workload import Workload

MODES = ("none", "shipped", "user", "auto")
RECORDED = "shipped record: default"  # where a default plan comes from that no other was preferred to
LOG, HEADER, LOCK = "measurements.jsonl", "arch.json", "lock"
METASCHEDULE = ("database_workload.json", "database_tuning_record.json")
SHARED = (
    "device",
    "driver",
    "runner",
)  # fields that a file of shipped records tells once, if all of its records have the same
SHIPPED = Path(__file__).resolve().parents[2] / "dist" / "tuned"


@dataclass
class Measured:
    """What measuring a plan gave.

    seconds     of a call; None: it could not be built or run, `error` says why
    runs        all repeats, in seconds
    device, driver, runner   what it was measured on, and how ("local", "rpc", "kit", "static")
    """

    seconds: float | None
    error: str = ""
    runs: list[float] = field(default_factory=list)
    device: str = ""
    driver: str = ""
    runner: str = ""


@dataclass
class Checked:
    """What comparing a plan's results with the default plan's gave.

    checked     where they were computed: "device", "lavapipe", "emulator"
    passed      whether they agree; deviation: the largest error found
    gain        how many times as fast as the default plan's kernel it was, at least, in three of four rounds of both in
                turns; None where nothing was timed
    """

    checked: str
    passed: bool
    deviation: float | None = None
    error: str = ""
    gain: float | None = None


@dataclass
class Record:
    """One plan of a workload: the fields of Measured, and of Checked ("" where nobody has checked it). default: it was
    the plan without tuning. over: the plan that was the default when it was checked. at: when it was measured, in
    seconds since 1970."""

    plan: dict
    seconds: float | None
    default: bool = False
    error: str = ""
    runs: list[float] = field(default_factory=list)
    device: str = ""
    driver: str = ""
    runner: str = ""
    checked: str = ""
    passed: bool = False
    deviation: float | None = None
    gain: float | None = None
    over: dict | None = None
    at: float = 0

    @property
    def usable(self) -> bool:
        """It ran, and its results are right: those of the default plan are what others are compared with."""
        return self.seconds is not None and (self.default or self.passed)

    @property
    def refuted(self) -> bool:
        """Its results were wrong."""
        return bool(self.checked) and not self.passed


@dataclass
class Entry:
    """A workload and its records, by plan."""

    workload: Workload
    hash: str  # as it was when they were made
    tvm: str
    records: dict[str, Record] = field(default_factory=dict)

    @property
    def stale(self) -> str:
        """Why the records cannot be used today, "" if they can."""
        if self.tvm != tvm.__version__:
            return f"made with TVM {self.tvm}, this is {tvm.__version__}"
        return "" if self.hash == self.workload.hash else "the kernel's plans have changed since"

    def refresh(self, found) -> "Entry":
        """Itself, with today's default plan as the default: that of the space `found`. What was the default once is a
        plan like others."""
        if found:
            default = as_dict(found.default)
            for record in self.records.values():
                record.default = record.plan == default
        return self

    def seconds(self, record: Record) -> float | None:
        """Of a call. The fastest of many was also the luckiest: where a plan was timed in turns with the default, that
        counts."""
        untuned = self.untuned
        in_turns = record.gain and untuned and untuned.seconds and record.over == untuned.plan and not record.default
        return untuned.seconds / record.gain if in_turns else record.seconds

    @property
    def ranked(self) -> list[Record]:
        """The records whose results are known to be right, the fastest first."""
        return sorted((record for record in self.records.values() if record.usable), key=self.seconds)

    @property
    def winner(self) -> Record | None:
        return next(iter(self.ranked), None)

    @property
    def untuned(self) -> Record | None:
        return next((record for record in self.records.values() if record.default), None)


def cache() -> Path:
    """The user's folder of tuned plans."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mlc-amd" / "tuned"


def file_name(arch_name: str) -> str:
    """An arch's name as a file's."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", arch_name)


def plan_text(plan: dict) -> str:
    return json.dumps(plan, separators=(",", ":"), sort_keys=True)


# ---- lines of the log


def read_lines(path: Path) -> tuple[list[dict], bool]:
    """The JSON objects of a file's lines, and whether all of the file was such lines."""
    if not path.exists():
        return [], True
    data = path.read_bytes()
    lines, whole = [], not data or data.endswith(b"\n")
    for line in data.splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            whole = False
    return lines, whole


def entries_of(lines: Iterable[dict]) -> dict[tuple[str, str, str], Entry]:
    """By (workload's key, hash, TVM version). A line is {"op", "args", "hash", "tvm"} and the fields of a Record that
    it tells."""
    found: dict[tuple[str, str, str], Entry] = {}
    for line in lines:
        workload = Workload.from_json(line)
        entry = found.setdefault((workload.key, line["hash"], line["tvm"]), Entry(workload, line["hash"], line["tvm"]))
        facts = {name: line[name] for name in Record.__dataclass_fields__ if name in line}
        if "seconds" in facts:
            entry.records[plan_text(line["plan"])] = Record(**facts)
        elif record := entry.records.get(plan_text(line["plan"])):  # a check of what was measured
            for name, value in facts.items():
                setattr(record, name, value)
    return found


# ---- writing


class Database:
    """One arch's measurements, open for tuning. One process at a time. To be closed, or used in a `with`.

    folder: default that of the arch in the user's cache. UserError if it belongs to another arch or another process has
    it open.
    """

    def __init__(self, arch, folder: Path | None = None):
        self.arch, self.folder = arch, folder or cache() / file_name(arch.name)
        self._spaces: dict[Workload, object] = {}
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = open(self.folder / LOCK, "w")  # noqa: SIM115 (closed by close())
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise UserError(
                f"another process is tuning for {arch.name} ({self.folder}); wait for it or stop it"
            ) from None
        try:
            _check_header(self.folder, arch)
            _write(self.folder / HEADER, json.dumps({"api": arch.api, "arch": arch.name}) + "\n")
            lines, whole = read_lines(self.folder / LOG)
            self.torn = not whole  # a line was dropped
            if self.torn:
                _write(self.folder / LOG, "".join(_line(line) for line in lines))
            self.entries = entries_of(lines)
            self._file = os.open(self.folder / LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        except BaseException:
            self._lock.close()
            raise
        self._metaschedule = _MetaSchedule(self)

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        os.close(self._file)
        self._lock.close()

    def entry(self, workload: Workload) -> Entry:
        """The workload's records that are valid today; more are to come."""
        key = (workload.key, workload.hash, tvm.__version__)
        entry = self.entries.setdefault(key, Entry(workload, workload.hash, tvm.__version__))
        return entry.refresh(self.space(workload))

    def space(self, workload: Workload):
        """The workload's space on this arch, None if there is nothing to choose. Found once."""
        if workload not in self._spaces:
            self._spaces[workload] = space(workload, self.arch)
        return self._spaces[workload]

    def record(self, workload: Workload, plan: dict) -> Record:
        """KeyError for a plan that was not measured."""
        return self.entry(workload).records[plan_text(plan)]

    def add(self, workload: Workload, record: Record) -> None:
        """Keeps a measurement; one of the same plan is replaced. It is on its way to the disk when this returns."""
        self._append(workload, asdict(record))
        self.entry(workload).records[plan_text(record.plan)] = record
        self._metaschedule.add(workload, record)

    def check(self, workload: Workload, plan: dict, found: Checked) -> None:
        """Keeps what a plan's numeric check found. KeyError for a plan without a measurement."""
        record, choices = self.record(workload, plan), self.space(workload)
        facts = asdict(found) | {"over": as_dict(choices.default) if choices and found.gain else None}
        self._append(workload, {"plan": plan} | facts)
        for name, value in facts.items():
            setattr(record, name, value)

    def _append(self, workload: Workload, facts: dict) -> None:
        line = {"op": workload.op, "args": workload.args, "hash": workload.hash, "tvm": tvm.__version__} | facts
        os.write(self._file, _line(line).encode())

    def export(self, path: Path, source: str, defaults: Container[Workload] = ()) -> int:
        """Writes the winners as a file of shipped records; returns how many. source: how they were found. defaults: the
        workloads of which the default plan is written, too, where it has won."""
        lines = []
        for entry in self.entries.values():
            winner, untuned = entry.winner, entry.untuned
            if not entry.stale and winner and (not winner.default or entry.workload in defaults):
                line = {"op": entry.workload.op, "args": entry.workload.args, "hash": entry.hash} | _told(winner)
                lines.append(line if winner.default or not untuned else line | {"default_seconds": untuned.seconds})
        shared = {
            name: lines[0][name]
            for name in SHARED
            if lines and all(line.get(name, "") == lines[0].get(name) for line in lines)
        }
        rest = [{name: value for name, value in line.items() if name not in shared} for line in lines]
        header = {
            "api": self.arch.api,
            "arch": self.arch.name,
            "tvm": tvm.__version__,
            "source": source,
            "shared": shared,
        }
        records = ",\n".join(
            _line(line)[:-1] for line in sorted(rest, key=lambda line: json.dumps([line["op"], line["args"]]))
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(path, json.dumps(header)[:-1] + f', "records": [\n{records}\n]}}\n')
        return len(lines)


class _MetaSchedule:
    """The measurements as MetaSchedule's JSONDatabase. If it lacks some, or was damaged, it is written anew from the
    log."""

    def __init__(self, database: Database):
        from tvm.s_tir.meta_schedule.database import JSONDatabase  # a second of imports that only tuning needs

        self.space, self._references = database.space, {}
        workloads, records = (database.folder / name for name in METASCHEDULE)
        wanted = [(e.workload, r) for e in database.entries.values() if not e.stale for r in e.records.values()]
        wanted = [(workload, record) for workload, record in wanted if not _misfit(self.space(workload), record.plan)]
        (names, whole), (have, complete) = read_lines(workloads), read_lines(records)
        if not whole or not complete or len(have) < len(wanted) or any(not 0 <= line[0] < len(names) for line in have):
            workloads.unlink(missing_ok=True)
            records.unlink(missing_ok=True)
            have = []
        self.json = JSONDatabase(str(workloads), str(records))
        for workload, record in wanted if not have else []:
            self.add(workload, record)

    def _reference(self, workload: Workload):
        if workload not in self._references:
            self._references[workload] = workload.reference()
        return self._references[workload]

    def add(self, workload: Workload, record: Record) -> None:
        from mlc_amd.schedules.tuning import traces  # imports MetaSchedule

        found = self.space(workload)
        if not _misfit(found, record.plan):
            mod = self._reference(workload)
            entry = self.json.commit_workload(mod)
            self.json.commit_tuning_record(traces.record(mod, entry, found, found.plan(record.plan), record.seconds))


def _check_header(folder: Path, arch) -> None:
    found, _ = read_lines(folder / HEADER)
    if found and (found[0].get("api"), found[0].get("arch")) != (arch.api, arch.name):
        raise UserError(
            f"{folder} holds records of {found[0].get('arch')} ({found[0].get('api')}), not of {arch.name} ({arch.api})"
        )


def _told(record: Record) -> dict:
    """The fields of a record that say something."""
    empty = asdict(Record({}, None))
    return {name: value for name, value in asdict(record).items() if value != empty[name]}


def _line(line: dict) -> str:
    return json.dumps(line, separators=(",", ":")) + "\n"


def _write(path: Path, text: str) -> None:
    """The whole file, or the old one."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


def _misfit(found, plan: dict) -> str | None:
    """Why a plan is none of the space, None if it is one."""
    if found is None:
        return "nothing to choose for it any more"
    try:
        made = found.plan(plan)
    except TypeError:
        return "its plan has other numbers today"
    outside = [name for name, values in found.choices.items() if getattr(made, name) not in values]
    return f"{', '.join(outside)} of its plan is no choice any more" if outside else found.valid(made)


# ---- reading


class Lookup:
    """The plans that a compile for one arch uses: callable(workload) -> plan or None for the kernel's own default.

    mode: of MODES; "auto" takes the user's record, else the shipped one. `notes`: what was left aside, and why. Nothing
    is written.
    """

    def __init__(self, arch, mode: str = "auto", user: Path | None = None, shipped: Path | None = None):
        if mode not in MODES:
            raise UserError(f"--tuned {mode} is none of {', '.join(MODES)}")
        self.arch, self.notes = arch, []
        self._found: dict[str, list[tuple[str, Entry]]] = {}
        if mode in ("user", "auto"):
            self._add("user", self._user(user or cache() / file_name(arch.name)))
        if mode in ("shipped", "auto"):
            self._add("shipped", self._shipped(shipped or SHIPPED / f"{file_name(arch.name)}.json"))

    def __call__(self, workload: Workload):
        return self.find(workload)[0]

    def find(self, workload: Workload) -> tuple[object | None, str]:
        """(plan, "user" or "shipped"), (None, RECORDED) for a shipped record of the default plan, or (None,
        "default")."""
        for source, entry in self._found.get(workload.key, []):
            if entry.stale:
                self._note(source, workload, entry.stale)
                continue
            found = space(workload, self.arch)
            for record in entry.refresh(found).ranked:
                if reason := _misfit(found, record.plan):
                    self._note(source, workload, reason)
                elif record.default:
                    return None, RECORDED if source == "shipped" else "default"
                else:
                    return found.plan(record.plan), source
        return None, "default"

    def _note(self, source: str, workload: Workload, reason: str) -> None:
        self.notes.append(f"{source} record of {workload.key} for {self.arch.name} ignored: {reason}")

    def _add(self, source: str, entries: Iterable[Entry]) -> None:
        for entry in entries:
            self._found.setdefault(entry.workload.key, []).append((source, entry))

    def _user(self, folder: Path) -> Iterable[Entry]:
        try:
            _check_header(folder, self.arch)
        except UserError as error:
            self.notes.append(str(error))
            return []
        return entries_of(read_lines(folder / LOG)[0]).values()

    def _shipped(self, path: Path) -> Iterable[Entry]:
        if not path.exists():
            return []
        data = json.loads(path.read_text())
        if (data["api"], data["arch"]) != (self.arch.api, self.arch.name):
            self.notes.append(
                f"{path} holds records of {data['arch']} ({data['api']}), not of {self.arch.name} ({self.arch.api})"
            )
            return []
        return entries_of({"tvm": data["tvm"]} | data.get("shared", {}) | line for line in data["records"]).values()


def known(entry: Entry, found) -> list[tuple[object, float | None]]:
    """(plan, seconds) of an entry's records that a search may learn from: plans of the space `found`; None for failed
    and wrong ones."""
    learned = {}
    for record in entry.records.values():
        if not _misfit(found, record.plan):
            learned[found.equal(found.plan(record.plan))] = None if record.refuted else entry.seconds(record)
    return list(learned.items())
