"""What a plan belongs to: an operator with its shapes and formats."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from mlc_amd.schedules.formats import Format, lookup

VERSION = 2  # of the plans' meaning and of the arguments' names: records of another version are stale
CAPACITY = "ctx"  # the argument that decides on buffers' extents only: records of one capacity serve all others


@dataclass(frozen=True, eq=False)
class Workload:
    """`op`: an operator's name, as in a target's `make_<op>`. `args`: that method's arguments besides `name` and
    `plan`, by name and in its order; JSON values (tuples become lists)."""

    op: str
    args: dict

    def __post_init__(self):
        object.__setattr__(self, "args", json.loads(json.dumps(self.args)))

    def __eq__(self, other) -> bool:
        return isinstance(other, Workload) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)

    @cached_property
    def text(self) -> str:
        """The workload as JSON: {"op", "args"}."""
        return _text(self.op, self.args)

    @cached_property
    def key(self) -> str:
        """A file name, the same in every process and for every KV cache capacity: "linear-2f81a0c36be5"."""
        args = {name: value for name, value in self.args.items() if name != CAPACITY}
        return f"{self.op}-{hashlib.sha256(_text(self.op, args).encode()).hexdigest()[:12]}"

    @property
    def capacity(self) -> int:
        """Tokens that the KV cache holds; 1 where the kernel has none."""
        return self.args.get(CAPACITY, 1)

    @cached_property
    def weights(self) -> list[tuple[Format, int]]:
        """(format, rows) of its weight matrices, of an expert where there are experts; empty for an operator without
        any."""
        args = self.args
        segments = args.get("segments") or [
            (args[name], args.get("n", args.get("vocab"))) for name in ("gate", "up", "fmt") if name in args
        ]
        return [(lookup(fmt), rows) for fmt, rows in segments]

    @classmethod
    def from_json(cls, data: Mapping) -> "Workload":
        """Of {"op", "args", ..}."""
        return cls(data["op"], data["args"])


def _text(op: str, args: dict) -> str:
    return json.dumps({"op": op, "args": args}, separators=(",", ":"))
