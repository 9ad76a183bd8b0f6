"""What is tuned: an operator with its shapes and formats, and the small module that MetaSchedule knows it by.

Kernels come out of builder functions that take a plan, so MetaSchedule never sees one. It searches over traces that
write a plan's numbers as annotations onto the block of `Workload.reference`, a module whose only content is the
workload's name.
"""

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property

import tvm
import tvm_ffi
from tvm import te

ATTRIBUTE = "mlc_amd.workload"
BLOCK = "task"  # of the reference: the annotations' place
# Part of the hash. To be raised when plans come to mean something else: records of older versions are then stale.
VERSION = 1


@dataclass(frozen=True, eq=False)
class Workload:
    """`op`: an operator's name, as in a target's `make_<op>`. `args`: what that method takes besides `name` and `plan`,
    by name and in its order; numbers, strings, None, and lists of them (tuples become lists)."""

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
        """The workload as JSON."""
        return json.dumps({"op": self.op, "args": self.args}, separators=(",", ":"))

    @cached_property
    def key(self) -> str:
        """A name that is the same in every process, fit for files: "linear-2f81a0c36be5"."""
        return f"{self.op}-{hashlib.sha256(self.text.encode()).hexdigest()[:12]}"

    def reference(self) -> tvm.IRModule:
        """The module that stands for the workload: equal workloads have structurally equal ones."""
        x = te.placeholder((1,), "float32", name="x")
        y = te.compute((1,), lambda i: x[i], name=BLOCK)
        text = json.dumps({"version": VERSION, "op": self.op, "args": self.args}, separators=(",", ":"))
        func = te.create_prim_func([x, y]).without_attr("global_symbol").with_attr(ATTRIBUTE, text)
        return tvm.IRModule({"main": func})

    @cached_property
    def hash(self) -> str:
        """The reference's structural hash, as MetaSchedule's databases write it."""
        return str(tvm_ffi.structural_hash(self.reference()) & 0xFFFFFFFFFFFFFFFF)

    @classmethod
    def of(cls, mod: tvm.IRModule) -> "Workload":
        """The workload of a reference, or of a schedule's module that began as one."""
        found = json.loads(str(mod["main"].attrs[ATTRIBUTE]))
        return cls(found["op"], found["args"])

    @classmethod
    def from_json(cls, data: dict) -> "Workload":
        """Of {"op", "args"}, as `text` has it."""
        return cls(data["op"], data["args"])
