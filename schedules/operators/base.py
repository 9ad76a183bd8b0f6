"""What an operator is: a dataclass whose fields are its attributes, declared once for all parts of the compiler.

The attributes of a call in the graph, the workload of its kernel, the entry in tuning's database and the manifest's
`args` are one value: an `Operator`. From its declaration follow

    results, written     types of a Relax call's results (compiler/ops.py)
    slots                roles of its kernel's parameters, in order
    operations, slots    costs of a call, which `bench` and `inspect` show
    label                the kernel's name in an artifact
    args, key            its identity in records of tuning

A target has a builder for each (schedules/cpu, schedules/gpu), tools/reference computes it in numpy.

Roles are those of runtime/measure/candidate.py: state, rows and pages (where rows are in sequences, where sequences are
in the cache), cells (where their states are), input, weight (planes, vectors, tables), cache (read or written
in place), states (the same of each sequence), output, work, zero (workspace, which is zero before and after each call).
"""

import functools
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cached_property
from math import prod
from typing import Any, ClassVar

import msgspec

from mlc_amd.schedules.formats import Format, lookup
from mlc_amd.schedules.operators.layouts import Tensor, output_rows

BYTES = {
    "int8": 1, "uint8": 1, "float16": 2, "bfloat16": 2, "uint16": 2, "int16": 2, "int32": 4, "uint32": 4, "float32": 4,
}  # fmt: skip
VERSION = 3  # of the plans' meaning and of the attributes' names: records of another version are stale


@dataclass(frozen=True)
class Slot:
    """Parameters of one role that follow one another.

    names     they have, in any number
    prefix    or how their names begin: the planes of a packed matrix; "" with `until`: all names until that one
    matrix    (format, columns) of these
    rows      of a table of which a token needs one; 0: it is read whole
    share     of a packed matrix that a call reads: below 1 where rows choose some of its experts
    columns   of an output that are not padding; 0: all
    slots     whether it says where rows go in a mixture of experts, or has a row for each slot and is written
    optional  whether a kernel may lack it
    """

    role: str
    names: tuple[str, ...] = ()
    prefix: str = ""
    until: str = ""
    matrix: tuple[str, int] | None = None
    rows: int = 0
    share: float = 1.0
    columns: int = 0
    slots: bool = False
    optional: bool = False

    def takes(self, name: str) -> bool:
        if self.names:
            return name in self.names
        return name != self.until if self.until else name.startswith(self.prefix)


STATE_SLOT = Slot("state", ("state",))
CELLS_SLOT = Slot("cells", ("cells",))
ROWS_SLOT, PAGES_SLOT = Slot("rows", ("rows",)), Slot("pages", ("pages",))
ACTIVATIONS_SLOT = Slot("input", ("A", "S", "X", "H"))  # in any layout of layouts.py
OUTPUT_SLOT = Slot("output", ("A", "S", "X", "Y", "H", "O", "A_out", "S_out"))


@dataclass(frozen=True)
class Parameter:
    """One parameter of a kernel, with the Slot that it belongs to."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    slot: Slot

    @property
    def role(self) -> str:
        return self.slot.role

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * BYTES[self.dtype]


@dataclass(frozen=True)
class Costs:
    """What a call must move and compute, for the rows that its kernel is made for.

    weights      bytes of weights that it reads whole, and of one sequence's states, read and written
    rows         bytes of table rows, of all tokens together
    activations  bytes of inputs and outputs
    position     bytes of one position of the cache
    reads        whether it reads the positions before its tokens
    keys         positions that a token sees at most
    fixed        operations (a multiplication and an addition are two) whatever the cache holds
    score        operations for each pair of a token and a position that it sees
    """

    weights: int = 0
    rows: float = 0
    activations: float = 0
    position: float = 0
    reads: bool = False
    keys: int = 0
    fixed: int = 0
    score: int = 0

    def bytes(self, tokens: int, depth: int, single: int = 0) -> float:
        """Of a call with so many live rows, of which `single` are of sequences of their own, each sequence after
        `depth` tokens."""
        sequences = single + (tokens > single)
        seen = sequences * (min(depth, self.keys) if self.reads else 0) + tokens
        return self.weights + self.rows + self.activations + self.position * seen

    def operations(self, tokens: int, depth: int, single: int = 0) -> int:
        chunk = sum(min(depth + i + 1, self.keys) for i in range(tokens - single))
        return self.fixed + self.score * (single * min(depth + 1, self.keys) + chunk)

    @property
    def manifest(self) -> dict:
        """`bytes` and `operations` of a kernel's entry in the manifest (dist/README.md)."""
        moved = {"call": self.weights, "token": self.position, "key": self.position if self.reads else 0}
        return {"bytes": moved, "operations": {"call": self.fixed, "score": self.score}, "keys": self.keys}


@dataclass(frozen=True, kw_only=True)
class Operator(ABC):
    """The base of all operators. A step computes m rows; `name` is the operator's in the graph and in artifacts.

    Fields that do not count in comparisons (compare=False) concern the graph only, not the kernel. Nested dataclasses
    and tuples are possible.
    """

    name: ClassVar[str]
    sizes: ClassVar[str] = ""  # in its kernel's name, as a template that is given the operator
    reads_cache: ClassVar[bool] = False  # the positions before its tokens, too

    m: int

    def __init_subclass__(cls, name: str = "", sizes: str = ""):
        cls.sizes = sizes or cls.sizes
        if name:
            cls.name = name
            OPERATORS[name] = cls

    @abstractmethod
    def slots(self) -> Iterable[Slot]:
        """Of its kernel's parameters: `state`, inputs in the order of a call's arguments, then outputs."""

    @abstractmethod
    def results(self) -> list[Tensor]:
        """(shape, dtype) of what a call returns, besides the tensors that it changes in place."""

    @property
    def label(self) -> str:
        """The name of its kernel, the same for operators that differ in details only."""
        return "_".join(filter(None, (self.name + self.variant, self.sizes.format(self), f"m{self.m}")))

    @property
    def variant(self) -> str:
        """The part of `label` after the operator's name."""
        return ""

    def operations(self) -> tuple[int, int]:
        """(fixed, score) as in `Costs`."""
        return 0, 0

    @property
    def written(self) -> int:
        """How many of a call's last arguments are changed in place, and follow its results."""
        return 0

    @property
    def arguments(self) -> int | None:
        """How many of a call's arguments its kernel takes, `state` included; None: all."""
        return None

    @property
    def formats(self) -> list[str]:
        """Of its weight matrices, of an expert where there are experts."""
        return []

    @property
    def weights(self) -> list[tuple[Format, int]]:
        """(format, rows) of these matrices; by default they have the attribute `n` rows each."""
        return [(lookup(fmt), vars(self)["n"]) for fmt in self.formats]

    @property
    def positions(self) -> int:
        """Positions that a sequence may have in the KV cache; 1 where the kernel has none."""
        return 1

    @property
    def most_keys(self) -> int:
        """Keys that a row sees at most; 0: all positions."""
        return 0

    @property
    def layout_read(self) -> str:
        """The layout of the activations that it reads."""
        return getattr(self, "layout_in", getattr(self, "layout", ""))

    # ---- identity

    @cached_property
    def attributes(self) -> dict[str, Any]:
        """All fields that differ from their default, as JSON values."""
        return _values(self, graph=True)

    @cached_property
    def args(self) -> dict[str, Any]:
        """The fields that decide the kernel, as JSON values; those with defaults only where they differ, so that an
        operator's identity outlives new attributes."""
        return _values(self, graph=False)

    @property
    def workload(self) -> "Operator":
        """The same without attributes that its kernel does not depend on."""
        return self

    @cached_property
    def text(self) -> str:
        """Its identity as JSON: {"op", "args"}."""
        return _text(self.name, self.args)

    @cached_property
    def key(self) -> str:
        """A file name, the same in every process and for every KV cache capacity: "linear-2f81a0c36be5"."""
        text = _text(self.name, _without_capacity(self.args))
        return f"{self.name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


FREE = Costs()  # of kernels that no operator of ours has
# By name. The modules of schedules/operators declare them; `from_json` imports all.
OPERATORS: dict[str, type[Operator]] = {}
CAPACITY = "ctx"  # the attribute that decides on buffers' extents only: records of one capacity serve all others


def _values(value: Any, graph: bool) -> Any:
    if is_dataclass(value):
        named = [(name, getattr(value, name), default) for name, default in _defaults(type(value), graph)]
        return {name: _values(own, graph) for name, own, default in named if default is MISSING or own != default}
    return [_values(item, graph) for item in value] if isinstance(value, tuple) else value


@functools.cache
def _defaults(declared: type, graph: bool) -> list[tuple[str, Any]]:
    """(name, default or MISSING) of its fields."""
    return [
        (field.name, field.default_factory() if field.default_factory is not MISSING else field.default)
        for field in fields(declared)
        if graph or field.compare
    ]


def _text(name: str, args: dict) -> str:
    return json.dumps({"op": name, "args": args}, separators=(",", ":"))


def _without_capacity(args: Any) -> Any:
    if isinstance(args, dict):
        return {name: _without_capacity(value) for name, value in args.items() if name != CAPACITY}
    return args


def from_json(data: Mapping[str, Any]) -> Operator:
    """The operator of {"op": name, "args": attributes, ..}. ValueError for what is none."""
    if data["op"] not in OPERATORS:
        raise ValueError(f"there is no operator '{data['op']}'")
    try:
        return msgspec.convert(data["args"], OPERATORS[data["op"]])
    except msgspec.ValidationError as error:
        raise ValueError(f"{data['op']}: {error}") from error


@functools.lru_cache(maxsize=4096)
def from_text(name: str, attributes: str) -> Operator:
    """The same of a name and JSON text."""
    return from_json({"op": name, "args": json.loads(attributes)})


def named(role: str, share: float = 1.0, **names: bool) -> Iterator[Slot]:
    """A slot for each of these names that the kernel has."""
    return (Slot(role, (name,), share=share) for name, wanted in names.items() if wanted)


# ---- parameters and costs


def parameters(op: Operator, params: Iterable[tuple[str, tuple[int, ...], str]]) -> list[Parameter]:
    """The kernel's parameters (name, shape, dtype) with their slots. ValueError if they are not those of the
    operator."""
    slots: Iterator[Slot] = iter(op.slots())
    slot, taken, found = next(slots), 0, []
    for name, shape, dtype in params:
        while not slot.takes(name):
            if not (taken or slot.optional):
                raise ValueError(f"{op.name}: parameter {name} where its declaration has {slot.role} {slot.names}")
            slot, taken = next(slots, None), 0
            if slot is None:
                raise ValueError(f"{op.name}: its declaration has no parameter {name}")
        taken += 1
        found.append(Parameter(name, tuple(shape), dtype, slot))
    return found


def costs(op: Operator, params: list[Parameter]) -> Costs:
    """What a call of the kernel with these parameters costs."""

    def of(role: str) -> list[Parameter]:
        return [param for param in params if param.role == role]

    inputs = sum(param.nbytes for param in of("input")) * output_rows(getattr(op, "rows", "all"), op.m) / op.m
    states = sum(2 * param.nbytes // param.shape[0] for param in of("states"))
    fixed, score = op.operations()
    return Costs(
        weights=int(sum(param.nbytes * param.slot.share for param in of("weight") if not param.slot.rows)) + states,
        rows=sum(param.nbytes * op.m / param.slot.rows for param in of("weight") if param.slot.rows),
        activations=inputs + sum(param.nbytes for param in of("output")),
        position=sum(param.nbytes for param in of("cache")) / op.positions,
        reads=op.reads_cache,
        keys=min(op.most_keys or op.positions, op.positions),
        fixed=fixed,
        score=score,
    )
