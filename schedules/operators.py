"""What every operator's kernel takes and costs: one table, from which tuning has its arguments' roles, and an
artifact's manifest the figures that `bench` and `inspect` show.

In: an operator's name, and its workload's arguments (a target's `make_<operator>` takes the same). Out: its kernel's
parameters in order, with roles, and `Costs`. Arguments that a workload lacks have their usual value.

Roles are those of runtime/measure/candidate.py: state, rows and pages (where rows are in sequences, where sequences are
in the cache), cells (where their states are), input, weight (planes, vectors, tables), cache (read or written
in place), states (the same of each sequence), output, work, zero (workspace, which is zero before and after each call).
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod

from mlc_amd.schedules.rows import output_rows

BYTES = {
    "int8": 1, "uint8": 1, "float16": 2, "bfloat16": 2, "uint16": 2, "int16": 2, "int32": 4, "uint32": 4, "float32": 4,
}  # fmt: skip


@dataclass(frozen=True)
class Slot:
    """Parameters of one role that follow one another.

    names     they have, in any number
    prefix    or how their names begin: the planes of a packed matrix; "" with `until`: all names until that one
    matrix    (format, columns) of these
    rows      of a table of which a token needs one; 0: it is read whole
    share     of a packed matrix that a call reads: below 1 where rows choose some of its experts
    columns   of an output that are not padding; 0: all
    slots     whether it tells where rows go in a mixture of experts, or has a row for each slot and is written
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

    weights: int
    rows: float
    activations: float
    position: float
    reads: bool
    keys: int
    fixed: int
    score: int

    def bytes(self, tokens: int, depth: int, single: int = 0) -> float:
        """Of a call with so many live rows, of which `single` are of sequences of their own, each sequence behind
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


# Of kernels whose operator is not in the table.
FREE = Costs(weights=0, rows=0, activations=0, position=0, reads=False, keys=0, fixed=0, score=0)


@dataclass(frozen=True)
class Operator:
    """slots: of its kernel's parameters, in order. operations: (fixed, score) as in `Costs`. reads_cache: the positions
    before its tokens, too."""

    slots: Callable[[dict], Iterable[Slot]]
    operations: Callable[[dict], tuple[int, int]] = lambda args: (0, 0)
    reads_cache: bool = False


def parameters(op: str, args: dict, params: Iterable[tuple[str, tuple[int, ...], str]]) -> list[Parameter]:
    """The kernel's parameters (name, shape, dtype) with their slots. ValueError if they are not those of the
    operator."""
    slots: Iterator[Slot] = iter(OPERATORS[op].slots(args))
    slot, taken, found = next(slots), 0, []
    for name, shape, dtype in params:
        while not slot.takes(name):
            if not (taken or slot.optional):
                raise ValueError(f"{op}: parameter {name} where schedules/operators.py has {slot.role} {slot.names}")
            slot, taken = next(slots, None), 0
            if slot is None:
                raise ValueError(f"{op}: schedules/operators.py has no parameter {name}")
        taken += 1
        found.append(Parameter(name, tuple(shape), dtype, slot))
    return found


def costs(op: str, args: dict, params: list[Parameter]) -> Costs:
    """What a call of the kernel with these parameters costs."""
    operator, m = OPERATORS[op], args.get("m", 1)

    def of(role: str) -> list[Parameter]:
        return [param for param in params if param.role == role]

    inputs = sum(param.nbytes for param in of("input")) * output_rows(args.get("rows", "all"), m) / m
    positions = args.get("ctx", 1)
    span = args.get("window") or args.get("chunk") or positions
    states = sum(2 * param.nbytes // param.shape[0] for param in of("states"))
    return Costs(
        weights=int(sum(param.nbytes * param.slot.share for param in of("weight") if not param.slot.rows)) + states,
        rows=sum(param.nbytes * m / param.slot.rows for param in of("weight") if param.slot.rows),
        activations=inputs + sum(param.nbytes for param in of("output")),
        position=sum(param.nbytes for param in of("cache")) / positions,
        reads=operator.reads_cache,
        keys=min(span, positions),
        fixed=operator.operations(args)[0],
        score=operator.operations(args)[1],
    )


# ---- the table

_STATE = Slot("state", ("state",))
_CELLS = Slot("cells", ("cells",))
_ROWS, _PAGES = Slot("rows", ("rows",)), Slot("pages", ("pages",))
_ACT = Slot("input", ("A", "S", "X", "H"))  # in any layout of compiler/ops.py
_OUT = Slot("output", ("A", "S", "X", "Y", "H", "O", "A_out", "S_out"))
_CACHE = Slot("cache", ("Kc", "Vc", "Ks", "Vs"))
_CHOICE = Slot("output", ("Ids", "Weights"))
_SCALES = Slot("output", ("NewScale",))  # of a norm: schedules/gpu/linear/deferred_norm.py
_GROUPS = Slot("input", ("Groups",), slots=True)


def _activations(args: dict) -> Iterator[Slot]:
    """Of a linear layer. eps: it computes the norm of its input, norm_in: it completes that."""
    if args.get("eps") is None:
        yield _ACT
    else:
        yield from (Slot("input", ("X",)), Slot("weight", ("G",)))
    if args.get("norm_in") is not None:
        yield Slot("input", ("Squares", "Scale"))


def _linear(args: dict) -> Iterator[Slot]:
    yield _STATE
    yield from _activations(args)
    for i, ((fmt, _), biased) in enumerate(zip(args["segments"], args["biases"], strict=True)):
        yield Slot("weight", prefix=f"W{i}_", matrix=(fmt, args["k"]))
        if biased:
            yield Slot("weight", (f"bias{i}",))
    if args.get("residual"):
        yield Slot("input", ("R",))
    if args.get("norm_out"):
        yield from (Slot("weight", ("NG",)), Slot("input", ("NS",)))
    for i, (_, n) in enumerate(args["segments"]):
        yield Slot("output", (f"Y{i}",), columns=n)
    if args.get("norm_out"):
        yield Slot("output", ("Hn", "NewSquares"))
    if args.get("norm_in") is not None:
        yield _SCALES


def _head_linear(args: dict) -> Iterator[Slot]:
    yield from (_STATE, _ACT)
    yield Slot("weight", prefix="W_", matrix=(args["fmt"], args["k"]))
    yield _OUT


def _gate_up(args: dict) -> Iterator[Slot]:
    yield _STATE
    yield from _activations(args)
    yield Slot("weight", prefix="G_", matrix=(args["gate"], args["k"]))
    yield Slot("weight", prefix="U_", matrix=(args["up"], args["k"]))
    yield _OUT
    if args.get("norm_in") is not None:
        yield _SCALES


def _rms_norm(args: dict) -> Iterator[Slot]:
    yield from (_STATE, Slot("input", ("X",)), Slot("weight", ("G",)), _OUT)
    if args.get("scale_out"):
        yield _SCALES


def _embed(args: dict) -> Iterator[Slot]:
    yield from (_STATE, Slot("input", ("tokens",)))
    yield Slot("weight", until="X", matrix=(args["fmt"], args["k"]), rows=args["vocab"])
    yield _OUT


def _rope(args: dict) -> Iterator[Slot]:
    writes = args.get("writes", True)
    yield Slot("input", ("Q", "K", "V") if writes else ("Q",))
    if args.get("eps") is not None:
        yield Slot("weight", ("QN", "KN") if writes else ("QN",))
    if args["rotary"]:
        yield Slot("weight", ("CS",), rows=args["ctx"])


def _rope_kv_write(args: dict) -> Iterator[Slot]:
    writes = args.get("writes", True)
    yield from (_STATE, _ROWS, _PAGES) if writes else (_STATE, _ROWS)
    yield from _rope(args)
    if writes:
        yield _CACHE
    yield Slot("output", ("Qo",))


def _latent_kv_write(args: dict) -> Iterator[Slot]:
    yield from (_STATE, _ROWS, _PAGES, Slot("input", ("Q", "L", "K")), Slot("weight", ("KN",)))
    if args["rotary"]:
        yield Slot("weight", ("CS",), rows=args["ctx"])
    yield from (_CACHE, Slot("output", ("Qo",)))


def _attention_end(args: dict) -> Iterator[Slot]:
    yield _CACHE
    if args.get("sinks"):
        yield Slot("weight", ("Sinks",))
    yield from (Slot("work", ("Parts",), optional=True), Slot("zero", ("Arrived",), optional=True), _OUT)


def _attention(args: dict) -> Iterator[Slot]:
    yield from (_STATE, _ROWS, _PAGES, Slot("input", ("Qo",)))
    yield from _attention_end(args)


def _rope_attention(args: dict) -> Iterator[Slot]:
    yield from (_STATE, _ROWS, _PAGES)
    yield from _rope(args)
    yield from _attention_end(args)


def _share(args: dict) -> float:
    """Of the experts that m rows are expected to use, if each chooses at random."""
    return 1.0 - (1.0 - args["used"] / args["experts"]) ** args.get("m", 1)


def _stack(prefix: str, fmt: str, args: dict) -> Slot:
    return Slot("weight", prefix=prefix, matrix=(fmt, args["k"]), share=_share(args))


def _route(args: dict) -> Iterator[Slot]:
    yield from (_STATE, Slot("input", ("L",), columns=args["experts"]))
    yield from _routing(args)
    yield _CHOICE


def _norm_route(args: dict) -> Iterator[Slot]:
    yield from (_STATE, Slot("input", ("X",)), Slot("weight", ("G",)))
    yield Slot("weight", prefix="W_", matrix=(args["fmt"], args["k"]))
    if args["router_bias"]:
        yield Slot("weight", ("WB",))
    yield from _routing(args)
    yield from (Slot("work", ("Logits",)), Slot("zero", ("Arrived",)), _OUT, _CHOICE)


def _routing(args: dict) -> Iterator[Slot]:
    if args.get("bias"):
        yield Slot("weight", ("B",))
    if args.get("factors"):
        yield Slot("weight", ("F",))


def _gather(args: dict) -> Iterator[Slot]:
    yield from (_STATE, Slot("input", ("X",)))
    if args["tile"] > 1:
        yield Slot("input", ("Pairs",), slots=True)
    if args["weighted"]:
        yield Slot("input", ("Weights",))
    yield replace(_OUT, slots=True)


def _expert_gate_up(args: dict) -> Iterator[Slot]:
    yield from (_STATE, _ACT, _GROUPS)
    yield from (_stack("G_", args["gate"], args), _stack("U_", args["up"], args))
    if args["biases"]:
        yield Slot("weight", ("GB", "UB"), share=_share(args))
    yield replace(_OUT, slots=True)


def _expert_linear(args: dict) -> Iterator[Slot]:
    yield from (_STATE, _ACT, _GROUPS, _stack("W_", args["fmt"], args))
    if args["bias"]:
        yield Slot("weight", ("WB",), share=_share(args))
    if args.get("weighted"):
        yield Slot("input", ("Weights",))
    if args.get("residual"):
        yield Slot("input", ("R",))
    yield Slot("output", ("Y",), columns=args["n"], slots=args["tile"] > 1)


def _combine(args: dict) -> Iterator[Slot]:
    yield from (_STATE, Slot("input", ("X",)), Slot("input", ("Slots",), slots=True))
    if args["weighted"]:
        yield Slot("input", ("Weights",))
    if args["residual"]:
        yield Slot("input", ("R",))
    yield _OUT


def _sample(args: dict) -> Iterator[Slot]:
    yield from (_STATE, Slot("input", ("Logits",), columns=args["vocab"]))
    yield Slot("input", ("sampling", "changes", "allowed"))
    yield from (Slot("output", ("Sampled", "LogProbs")), Slot("work", ("Adjusted",)))


def _causal_conv(args: dict) -> Iterator[Slot]:
    yield from (_STATE, _ROWS, _CELLS, Slot("input", prefix="X"), Slot("weight", prefix="W"))
    if args["bias"]:
        yield Slot("weight", ("B",))
    yield from (Slot("states", ("States",)), Slot("output", ("Y",)))


def _scan(inputs: tuple[str, ...], weights: tuple[str, ...]) -> Callable[[dict], tuple[Slot, ...]]:
    """Of a layer that has matrices as its state."""
    own = Slot("input", inputs), *([Slot("weight", weights)] if weights else [])
    return lambda args: (_STATE, _ROWS, _CELLS, *own, Slot("states", ("States",)), Slot("output", ("Y",)))


# of a delta net: inputs and weights, by whether its decays are those of channels
DECAYS = {False: (("X", "Beta", "Alpha"), ("A", "Dt")), True: (("X", "Beta", "Decay"), ())}


def _expert_products(args: dict, matrices: int) -> tuple[int, int]:
    return 2 * args["m"] * args["used"] * args["k"] * args["n"] * matrices, 0


def _scores(args: dict) -> tuple[int, int]:
    """Two products for each head, of a key's and of a value's elements."""
    return 0, 2 * args["heads"] * (args["d"] + (args.get("values") or args["d"]))


OPERATORS = {
    "embed": Operator(_embed),
    "rms_norm": Operator(_rms_norm),
    "layer_norm": Operator(
        lambda args: (_STATE, Slot("input", ("X",)), Slot("weight", ("G", "B") if args["bias"] else ("G",)), _OUT)
    ),
    "quantize": Operator(lambda args: (_STATE, Slot("input", ("X",)), _OUT)),
    "linear": Operator(_linear, lambda args: (2 * args["m"] * args["k"] * sum(n for _, n in args["segments"]), 0)),
    "head_linear": Operator(_head_linear, lambda args: (2 * args["m"] * args["heads"] * args["k"] * args["n"], 0)),
    "gate_up": Operator(_gate_up, lambda args: (2 * args["m"] * args["k"] * 2 * args["n"], 0)),
    "rope_kv_write": Operator(_rope_kv_write),
    "latent_kv_write": Operator(_latent_kv_write),
    "attention": Operator(_attention, _scores, reads_cache=True),
    "rope_attention": Operator(_rope_attention, _scores, reads_cache=True),
    "route": Operator(_route),
    "norm_route": Operator(_norm_route, lambda args: (2 * args["k"] * args["experts"], 0)),
    "expert_order": Operator(
        lambda args: (_STATE, Slot("input", ("Ids",), slots=True), Slot("output", ("Slots", "Pairs", "Groups")))
    ),
    "gather": Operator(_gather),
    "expert_gate_up": Operator(_expert_gate_up, lambda args: _expert_products(args, 2)),
    "expert_linear": Operator(_expert_linear, lambda args: _expert_products(args, 1)),
    "expert_down": Operator(_expert_linear, lambda args: _expert_products(args, 1)),
    "combine": Operator(_combine),
    "sample": Operator(_sample),
    "ssm_scan": Operator(
        _scan(("X", "Z", "Dt"), ("A", "D", "Bias")),
        lambda args: (6 * args["m"] * args["heads"] * args["d"] * args["size"], 0),
    ),
    "channel_decay": Operator(
        lambda args: (_STATE, Slot("input", ("X",)), Slot("weight", ("A", "Dt")), Slot("output", ("Y",)))
    ),
    "delta_net": Operator(
        lambda args: _scan(*DECAYS[bool(args.get("by_channel"))])(args),
        lambda args: (8 * args["m"] * args["value_heads"] * args["d"] ** 2, 0),  # two products, decay and update
    ),
    "gate": Operator(
        lambda args: (
            _STATE,
            Slot("input", ("X", "Z")),
            *([] if args["eps"] is None else [Slot("weight", ("G",))]),
            _OUT,
        )
    ),
    "causal_conv": Operator(_causal_conv, lambda args: (2 * args["m"] * args["channels"] * args["taps"], 0)),
}
