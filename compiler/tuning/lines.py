"""The types of the files of measurements: lines of measurements.jsonl, and shipped records. database.py describes their
meaning.

In: a file, which may be damaged or come from another machine. Out: the valid lines, and notes about the others.
"""

from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict

import msgspec
from msgspec import Meta

from mlc_amd.runtime.artifact import json_files
from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.operators import VERSION, from_json

ADVICE = "delete the file, or put a good one there"
# Seconds of a call. The limit, a day, is more than any kernel takes, and keeps sums and quotients finite.
Seconds = Annotated[float, Meta(gt=0, le=86400)]
Ratio = Annotated[float, Meta(gt=0, le=1e9)]
Figure = Annotated[float, Meta(ge=0, le=1e30)]
Word = Annotated[str, Meta(max_length=100, pattern=r"^[ -~]*\Z")]  # a text that messages show
Arguments = dict[str, Any]  # arguments of a workload; `from_json` checks them
PlanFields = dict[str, int]


class About(TypedDict):
    """The kernel to which a record belongs."""

    op: str
    args: Arguments


class RecordLine(TypedDict):
    """Fields of database.Record."""

    plan: PlanFields
    seconds: NotRequired[Seconds | None]
    error: NotRequired[str]
    runs: NotRequired[list[Seconds]]
    device: NotRequired[str]
    driver: NotRequired[str]
    runner: NotRequired[str]
    checked: NotRequired[str]
    passed: NotRequired[bool]
    deviation: NotRequired[Figure | None]
    gain: NotRequired[Ratio | None]
    default: NotRequired[bool]
    over: NotRequired[PlanFields | None]
    at: NotRequired[Figure]


class Line(About, RecordLine):
    version: NotRequired[Annotated[int, Meta(ge=0, le=1 << 30)]]
    tvm: Word


class ArchLine(TypedDict):
    """arch.json."""

    api: Word
    arch: Word


class Shipped(ArchLine):
    tvm: Word
    version: int
    records: list[Arguments]


def read(path: Path) -> tuple[list[Line], list[str]]:
    """(the valid lines of a file, reasons why others are invalid). Raises UserError if the file cannot be read."""
    if not path.exists():
        return [], []
    data = json_files.read_bytes(path)
    lines, notes = [], []
    for number, line in enumerate(data.split(b"\n")[:-1], 1):
        try:
            lines.append(checked(json_files.decode(line, Line, f"{path}, line {number},", "it is left out")))
        except UserError as error:
            notes.append(str(error))
    if data and not data.endswith(b"\n"):
        notes.append(f"{path} ends within a line, which is left out")
    return lines, notes


def checked(line: Line) -> Line:
    """The line itself. Raises UserError for a line of the current version without a valid operator."""
    if line.get("version", 0) == VERSION:
        try:
            operator = from_json(line)
        except ValueError as error:
            raise UserError(f"a line without a valid operator is left out: {error}") from error
        if not 1 <= operator.positions <= 1 << 40:
            raise UserError("a line with an impossible 'ctx' is left out")
    return line


def fault(line: dict) -> str:
    """The reason why a line must not be written; "" for a valid line."""
    try:
        checked(msgspec.convert(line, Line))
    except (msgspec.ValidationError, UserError) as error:
        return str(error)
    return ""
