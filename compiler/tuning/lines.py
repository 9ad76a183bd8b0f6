"""The files of measurements as types: lines of measurements.jsonl, and records that are shipped. database.py says what
they mean.

In: a file, perhaps damaged, or of another machine. Out: the lines that can be used, and notes about the others.
"""

from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict

import msgspec
from msgspec import Meta

from mlc_amd.runtime.artifact import json_files
from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.operators import VERSION, from_json

ADVICE = "delete the file, or put a good one there"
# Of a call: a day is too much for any kernel, and what comes of adding and dividing such numbers is finite.
Seconds = Annotated[float, Meta(gt=0, le=86400)]
Ratio = Annotated[float, Meta(gt=0, le=1e9)]
Figure = Annotated[float, Meta(ge=0, le=1e30)]
Word = Annotated[str, Meta(max_length=100, pattern=r"^[ -~]*\Z")]  # that messages repeat
Arguments = dict[str, Any]  # of a workload; what there is of each operator, kernels know
PlanFields = dict[str, int]


class About(TypedDict):
    """Which kernel a record belongs to."""

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
    """The good lines of a file, and why others are none. UserError where the file cannot be read."""
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
    """UserError for a line of today's version whose operator is none."""
    if line.get("version", 0) == VERSION:
        try:
            operator = from_json(line)
        except ValueError as error:
            raise UserError(f"a line without a valid operator is left out: {error}") from error
        if not 1 <= operator.positions <= 1 << 40:
            raise UserError("a line with an impossible 'ctx' is left out")
    return line


def fault(line: dict) -> str:
    """Why a line must not be written; "" for a good one."""
    try:
        checked(msgspec.convert(line, Line))
    except (msgspec.ValidationError, UserError) as error:
        return str(error)
    return ""
