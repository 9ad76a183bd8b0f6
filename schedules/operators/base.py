"""`Operator`, the base class of all operators: a frozen dataclass whose fields are the operator's attributes. All parts
of the compiler use this one declaration: an `Operator` is the attributes of a call in the graph, the workload of its
kernel, the entry in the tuning database, and `args` in the manifest. Its members determine

    results, written     the types of a Relax call's results (compiler/ops.py)
    slots                the roles of its kernel's parameters, in order
    operations, slots    the costs of a call, which `bench` and `inspect` show
    label                the kernel's name in an artifact
    args, key            its identity in tuning records

Each target has a function that builds the kernel of an operator (schedules/cpu, schedules/gpu). tools/reference
computes each operator in numpy.

Docstrings of operators have the form "(arguments) -> results", without the first argument, `state`; [x] is an argument
that only some attributes add.

The role of a parameter is one of runtime/measure/candidate.py: state; rows (position and slot of each row); pages (the
page table of the KV cache); cells (where the states of sequences are); input; weight (planes, vectors, tables); cache
(keys and values, read or written in place); states (of sequences, read and written in place); output; work (workspace);
zero (workspace that is zero before and after each call).
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
VERSION = 3  # version of tuning records; changes with the meaning of plans or the names of attributes


@dataclass(frozen=True)
class Slot:
    """Consecutive parameters of a kernel that have the same role.

    names     the names that the parameters may have; a kernel has one or more of them
    prefix    without `names`: what their names begin with, for the planes of a packed matrix
    until     without `names` and `prefix`: all parameters before the one of this name
    matrix    (format, columns) of the packed matrix
    rows      rows of a table of which each token reads one row; 0: the parameters are read completely
    share     the fraction of a packed matrix that a call reads: below 1 for a stack of experts
    columns   columns of an output that are not padding; 0: all
    slots     mixture of experts: true for an input that maps rows to slots, and for an output with a row for each slot
    optional  true if a kernel may lack these parameters
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
        """Whether a parameter of this name belongs to the slot."""
        if self.names:
            return name in self.names
        return name != self.until if self.until else name.startswith(self.prefix)


STATE_SLOT = Slot("state", ("state",))
CELLS_SLOT = Slot("cells", ("cells",))
ROWS_SLOT, PAGES_SLOT = Slot("rows", ("rows",)), Slot("pages", ("pages",))
ACTIVATIONS_SLOT = Slot("input", ("A", "S", "X", "H"))  # activations in any layout of layouts.py
OUTPUT_SLOT = Slot("output", ("A", "S", "X", "Y", "H", "O", "A_out", "S_out"))


@dataclass(frozen=True)
class Parameter:
    """One parameter of a kernel, and the Slot that it belongs to."""

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
    """The bytes that a call must move and the operations that it must compute, for all m rows of its kernel.

    weights      bytes of weights that are read completely, plus the bytes of one sequence's states, read and written
    rows         bytes of the table rows that all tokens together read
    activations  bytes of inputs and outputs
    position     bytes of one position of the cache
    reads        whether the call reads the positions before its tokens
    keys         largest number of positions that a token attends to
    fixed        operations that do not depend on the cache; a multiplication and an addition are two operations
    score        operations for each pair of a token and a position that it attends to
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
        """Bytes that a call moves. tokens: live rows; single: how many of them are single rows, each of its own
        sequence (the others are one chunk); depth: tokens of each sequence that are already in the cache."""
        sequences = single + (tokens > single)
        seen = sequences * (min(depth, self.keys) if self.reads else 0) + tokens
        return self.weights + self.rows + self.activations + self.position * seen

    def operations(self, tokens: int, depth: int, single: int = 0) -> int:
        """Operations of a call; arguments as for `bytes`."""
        chunk = sum(min(depth + i + 1, self.keys) for i in range(tokens - single))
        return self.fixed + self.score * (single * min(depth + 1, self.keys) + chunk)

    @property
    def manifest(self) -> dict:
        """The keys `bytes`, `operations` and `keys` of a kernel's entry in the manifest (dist/README.md)."""
        moved = {"call": self.weights, "token": self.position, "key": self.position if self.reads else 0}
        return {"bytes": moved, "operations": {"call": self.fixed, "score": self.score}, "keys": self.keys}


@dataclass(frozen=True, kw_only=True)
class Operator(ABC):
    """The base class of all operators. m: rows of a step. name: the operator's name in the graph and in artifacts.

    Fields with compare=False concern only the graph, not the kernel. A field's value may be a nested dataclass or a
    tuple.
    """

    name: ClassVar[str]
    sizes: ClassVar[str] = ""  # the part of `label` with the sizes: a template for str.format(operator)
    reads_cache: ClassVar[bool] = False  # whether it reads the cache at positions before its tokens

    m: int

    def __init_subclass__(cls, name: str = "", sizes: str = ""):
        cls.sizes = sizes or cls.sizes
        if name:
            cls.name = name
            OPERATORS[name] = cls

    @abstractmethod
    def slots(self) -> Iterable[Slot]:
        """The slots of its kernel's parameters: `state`, inputs in the order of a call's arguments, then outputs."""

    @abstractmethod
    def results(self) -> list[Tensor]:
        """(shape, dtype) of each tensor that a call returns, without the tensors that it changes in place."""

    @property
    def label(self) -> str:
        """The name of its kernel in an artifact. Operators that differ only in details may have the same label."""
        return "_".join(filter(None, (self.name + self.variant, self.sizes.format(self), f"m{self.m}")))

    @property
    def variant(self) -> str:
        """The part of `label` after the operator's name."""
        return ""

    def operations(self) -> tuple[int, int]:
        """(fixed, score) of `Costs`."""
        return 0, 0

    @property
    def written(self) -> int:
        """The number of arguments, at the end of a call's arguments, that the kernel changes in place. The Relax call
        returns them after its results."""
        return 0

    @property
    def arguments(self) -> int | None:
        """The number of a call's arguments that its kernel takes, including `state`; None: all."""
        return None

    @property
    def formats(self) -> list[str]:
        """The formats of its weight matrices; for a mixture of experts, of one expert's matrices."""
        return []

    @property
    def weights(self) -> list[tuple[Format, int]]:
        """(format, rows) of each matrix of `formats`. By default a matrix has as many rows as the attribute `n`."""
        return [(lookup(fmt), vars(self)["n"]) for fmt in self.formats]

    @property
    def positions(self) -> int:
        """Positions of the KV cache that its cache parameters hold; 1 for a kernel without a cache."""
        return 1

    @property
    def most_keys(self) -> int:
        """The largest number of keys that a row attends to; 0: all positions."""
        return 0

    @property
    def layout_read(self) -> str:
        """The layout of the activations that the kernel reads."""
        return getattr(self, "layout_in", getattr(self, "layout", ""))

    # ---- identity

    @cached_property
    def attributes(self) -> dict[str, Any]:
        """All fields that differ from their default, as JSON values."""
        return _values(self, graph=True)

    @cached_property
    def args(self) -> dict[str, Any]:
        """The fields that determine the kernel, as JSON values. Fields that have their default value are left out, so
        that a new attribute with a default does not change the identity of existing operators."""
        return _values(self, graph=False)

    @property
    def workload(self) -> "Operator":
        """This operator with default values for the attributes that its kernel does not depend on."""
        return self

    @cached_property
    def text(self) -> str:
        """The operator as JSON text: {"op": name, "args": args}."""
        return _text(self.name, self.args)

    @cached_property
    def key(self) -> str:
        """The operator's file name, such as "linear-2f81a0c36be5". It is the same in every process and for every
        capacity of the KV cache."""
        text = _text(self.name, _without_capacity(self.args))
        return f"{self.name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


FREE = Costs()  # the costs of kernels that belong to none of our operators
OPERATORS: dict[str, type[Operator]] = {}  # name to class; each subclass with a name adds itself
CAPACITY = "ctx"  # this attribute only determines extents of buffers: a tuning record holds for all its values


def _values(value: Any, graph: bool) -> Any:
    if is_dataclass(value):
        named = [(name, getattr(value, name), default) for name, default in _defaults(type(value), graph)]
        return {name: _values(own, graph) for name, own, default in named if default is MISSING or own != default}
    return [_values(item, graph) for item in value] if isinstance(value, tuple) else value


@functools.cache
def _defaults(declared: type, graph: bool) -> list[tuple[str, Any]]:
    """(name, default value or MISSING) of each field of a dataclass. graph: also fields with compare=False."""
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
    """The operator that {"op": name, "args": attributes, ..} describes. Raises ValueError if there is no such operator,
    or if the attributes do not fit."""
    if data["op"] not in OPERATORS:
        raise ValueError(f"there is no operator '{data['op']}'")
    try:
        return msgspec.convert(data["args"], OPERATORS[data["op"]])
    except msgspec.ValidationError as error:
        raise ValueError(f"{data['op']}: {error}") from error


@functools.lru_cache(maxsize=4096)
def from_text(name: str, attributes: str) -> Operator:
    """The operator of this name whose attributes are given as JSON text. Raises ValueError as `from_json`."""
    return from_json({"op": name, "args": json.loads(attributes)})


def named(role: str, share: float = 1.0, **names: bool) -> Iterator[Slot]:
    """A slot for each parameter name whose value is true."""
    return (Slot(role, (name,), share=share) for name, wanted in names.items() if wanted)


# ---- parameters and costs


def parameters(op: Operator, params: Iterable[tuple[str, tuple[int, ...], str]]) -> list[Parameter]:
    """Assigns a slot of the operator to each parameter of its kernel. params: (name, shape, dtype) of each. Raises
    ValueError if they do not match the operator's slots."""
    slots: Iterator[Slot] = iter(op.slots())
    slot, taken, found = next(slots), 0, []
    for name, shape, dtype in params:
        while not slot.takes(name):
            if not (taken or slot.optional):
                raise ValueError(f"{op.name}: parameter {name}, but its declaration expects {slot.role} {slot.names}")
            slot, taken = next(slots, None), 0
            if slot is None:
                raise ValueError(f"{op.name}: its declaration has no parameter {name}")
        taken += 1
        found.append(Parameter(name, tuple(shape), dtype, slot))
    return found


def costs(op: Operator, params: list[Parameter]) -> Costs:
    """The costs of a call of the operator's kernel, which has these parameters."""

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
