"""Makes the records that the project ships from a user's measurements: `mlc-amd tune .. --ship DIR`.

In: the database of an arch, after a run or the import of a kit, and a folder of shipped records (dist/tuned in a
checkout). Out: DIR/<arch>.json, which `compile` reads for all users of such a GPU. For each workload whose fastest plan
is better than the default by GAIN, it has the Record (compiler/tuning/database.py) and the command that measured it.

A record replaces a shipped one of the same workload if its gain is larger. Shipped records are removed if current
kernels cannot be built with them, if their plan is now the default of the rule, or if their gain refers to an earlier
default.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tvm

from mlc_amd.compiler.tuning import lines
from mlc_amd.compiler.tuning.database import Database, Record, file_name, shipped_lines
from mlc_amd.schedules.operators import VERSION, from_json
from mlc_amd.schedules.space import space

GAIN = 1.03  # the least speedup over the rule's plan, in interleaved rounds; smaller ones may not be reproducible
_EMPTY = asdict(Record(plan={}, seconds=None))


@dataclass(frozen=True)
class Shipping:
    """The changes to a file of shipped records: numbers of records that are new, replaced older ones, stayed, were
    pruned."""

    path: Path
    added: int
    replaced: int
    stayed: int
    pruned: int


def ship(database: Database, folder: Path, command: str) -> Shipping:
    """Updates DIR/<arch>.json. Raises UserError if the existing file is damaged or of another arch."""
    arch, path = database.arch, folder / f"{file_name(database.arch.name)}.json"
    before = shipped_lines(path, arch)
    known = {line["key"]: line for line in map(_keyed, before) if line and _differs(line, arch)}
    stayed = dict(known)
    for line in _worth_shipping(database, command):
        old = known.get(line["key"])
        if old is None or line["gain"] > old.get("gain", 0.0):
            known[line["key"]] = line
    replaced = sum(known[key] is not line for key, line in stayed.items())
    folder.mkdir(parents=True, exist_ok=True)
    _write(path, arch, list(known.values()))
    added = len(known) - len(stayed)
    return Shipping(path, added, replaced, len(stayed) - replaced, len(before) - len(stayed))


def _worth_shipping(database: Database, command: str) -> list[dict[str, Any]]:
    """A line for each workload whose fastest plan is verified and at least GAIN times as fast as the rule's plan."""
    found = []
    for workload, entry in database.entries.items():
        winner = entry.winner
        if winner and not winner.default and winner.passed and (winner.gain or 0.0) >= GAIN:
            facts = {name: value for name, value in asdict(winner).items() if value != _EMPTY[name]}
            line = {"op": workload.name, "args": workload.args} | facts | {"command": command}
            found.append(line | {"key": workload.key})
    return [line for line in found if _differs(line, database.arch)]


def _keyed(line: dict[str, Any]) -> dict[str, Any] | None:
    """The line with the key of its workload. None if it belongs to another version of kernels."""
    if line.get("version") != VERSION or line["tvm"] != tvm.__version__ or lines.fault(line):
        return None
    facts = {name: value for name, value in line.items() if name not in ("tvm", "version")}
    return facts | {"key": from_json(line).key}


def _differs(line: dict[str, Any], arch: Any) -> bool:
    """Whether the plan is in the current space, is not the rule's plan, and its gain refers to the rule's plan."""
    found = space(from_json(line), arch)
    try:
        if found is None or found.equal(found.parse(line["plan"])) == found.default:
            return False
        return line.get("over") in (None, asdict(found.default))
    except (ValueError, KeyError):
        return False


def _write(path: Path, arch: Any, records: list[dict[str, Any]]) -> None:
    header = {"api": arch.api, "arch": arch.name, "tvm": tvm.__version__, "version": VERSION}
    texts = [json.dumps({n: v for n, v in line.items() if n != "key"}, separators=(",", ":")) for line in records]
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(header)[:-1] + ', "records": [\n' + ",\n".join(sorted(texts)) + "\n]}\n")
    temporary.replace(path)
