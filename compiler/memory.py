"""The memory that a model needs on a target. Follows from the model's configuration and tensors alone; nothing is
compiled.

In: a model (GGUFModel), a Target, a capacity in tokens. Out: `needs`, a `Needs` of runtime/artifact/memory.py, in which
the size of the buffers is an estimate; and the sizes of the cache (`kept`, `token_bytes`).
"""

import math

from mlc_amd.compiler.models.config import ExpertsConfig, ModelConfig
from mlc_amd.compiler.models.graph import table_columns
from mlc_amd.compiler.weights import tensor_source
from mlc_amd.runtime.artifact.io_names import DRAFTED, HIDDEN
from mlc_amd.runtime.artifact.manifest import RANK, KvTensor
from mlc_amd.runtime.artifact.memory import EXPERTS, Needs, nbytes
from mlc_amd.runtime.cache.kv_pool import ELEMENTS, MOST_CELLS
from mlc_amd.runtime.cache.pages import STATE
from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.operators.attention import PAGE
from mlc_amd.schedules.operators.layouts import padded

FEWEST_CELLS = 8  # lower limit of the default number of cells (states and snapshots); one sequence needs two


def needs(model, target, ctx: int) -> Needs:
    """The memory that the model needs at a capacity of `ctx` tokens."""
    config, experts, weights = model.config, [0] * len(model.config.layers), 0
    for name in model.tensors:
        if name in config.unused or RANK in name:  # RANK: a part that another GPU has
            continue
        size = tensor_source(model, target, name).nbytes
        weights += size
        if found := EXPERTS.match(name):
            experts[int(found[1])] += size
    tensors = kept(config, target, ctx)
    states, functions, row = _states(tensors), target.functions_of(config, ctx), 4 * padded(config.columns)
    logits, sampled = (
        max(f.logits for f in functions) * row,
        max((f.logits for f in functions if f.samples), default=0) * row,
    )
    return Needs(
        weights=weights + ctx * _table_bytes(config),
        experts=tuple(experts),
        kv=sum(map(nbytes, tensors)),
        token=token_bytes(config, target, ctx, tensors),
        # GPUs that share the model compute two chunks at the same time. `sampled`: logits that sampling has adjusted
        buffers=_intermediate(config, target, ctx) * min(model.gpus, 2) + logits + sampled,
        context=ctx,
        longest=config.context,
        states=sum(map(nbytes, states)),
        cells=states[0]["shape"][0] if states else 0,
        copies=0 if target.kind == "cpu" else logits,
    )


def kept(config: ModelConfig, target, ctx: int) -> list[KvTensor]:
    """The tensors that live from step to step: the KV cache with the pages of one sequence, the states of sequences,
    the workspaces of attention and routing, and rows that are kept for drafting."""
    spans, longest = target.spans(config, ctx), max(f.m for f in target.functions_of(config, ctx))
    found: list[KvTensor] = []

    def add(name: str, shape, dtype: str) -> None:
        found.append({"name": name, "dtype": dtype, "shape": list(shape)})
        if name in spans:
            found[-1]["span"] = spans[name]

    for name, (shape, dtype) in target.kv_types(config, ctx).items():
        if spans[name] != STATE:
            add(name, (sequence_pages(spans[name], ctx, longest), *shape[1:]), dtype)
    if states := target.state_types(config, ctx):
        cell = sum(nbytes({"shape": shape[1:], "dtype": dtype}) for shape, dtype in states.values())
        cells = cell_count(sum(map(nbytes, found)), cell)
        for name, (shape, dtype) in states.items():
            add(name, (cells, *shape[1:]), dtype)
    cached = () if config.encoder else config.layers
    workspace = {name: of for layer in cached for name, of in target.workspace(layer, ctx).items()}
    for name, of in workspace.items():
        add(name, *of)
    for i in config.kept:
        add(f"{HIDDEN}{i}", (longest, config.hidden), "float32")
    if config.drafted:
        add(DRAFTED, (longest, config.drafted), "float32")
    return found


def check_capacity(tensors: list[KvTensor], ctx: int) -> None:
    """Raises UserError if a tensor of the KV cache has more elements than kernels can address. tensors: of `kept`."""
    largest = max((math.prod(tensor["shape"]) for tensor in tensors), default=0)
    if largest > ELEMENTS:
        fitting = ctx * ELEMENTS // largest // PAGE * PAGE
        raise UserError(
            f"--ctx {ctx} is too large: a tensor of the KV cache would have {largest} elements, and kernels address "
            f"{ELEMENTS}; use {fitting} or less"
        )


def cell_count(pages: int, cell: int) -> int:
    """The number of cells for states. pages: bytes of the pages; cell: bytes of a cell. Cells take a quarter as many
    bytes as the pages do, so that snapshots of states do not dominate the memory of a model, but there are enough cells
    for a few sequences."""
    return max(FEWEST_CELLS, min(MOST_CELLS, pages // (4 * cell)))


def sequence_pages(span: int, ctx: int, rows: int) -> int:
    """The number of pages that one sequence of up to `ctx` tokens needs in layers of that span, for steps of up to
    `rows` rows. span: window in tokens, 0 for none. With a window, these are the pages that the next row attends to and
    the pages of the step's own keys. Each of these two ranges may have a partial page at both ends."""
    window = -(-(span - 1) // PAGE) + 1 + -(-rows // PAGE) + 1
    return min(ctx // PAGE, window) if span else ctx // PAGE


def token_bytes(config: ModelConfig, target, ctx: int, tensors: list[KvTensor]) -> int:
    """Bytes that one more token of capacity takes, in the cache (without states) and in the tables by position.
    tensors: the result of `kept` at `ctx` tokens."""
    larger = kept(config, target, ctx + PAGE)
    now, more = (sum(map(nbytes, found)) - sum(map(nbytes, _states(found))) for found in (tensors, larger))
    return (more - now) // PAGE + _table_bytes(config)


def _states(tensors: list[KvTensor]) -> list[KvTensor]:
    return [tensor for tensor in tensors if tensor.get("span") == STATE]


def _table_bytes(config: ModelConfig) -> int:
    """Bytes of one token in all tables by position (RoPE's angles, float32)."""
    return 4 * sum(table_columns(config).values())


def _intermediate(config: ModelConfig, target, ctx: int) -> int:
    """An estimate of the bytes of the intermediate tensors of the largest step, accurate to a third. For each row, two
    rows of hidden size are live, and the widest row that a layer computes."""
    m = max(f.m for f in target.functions_of(config, ctx))
    return m * (2 * 4 * config.hidden + max(_row_bytes(layer, config.hidden, m, target) for layer in config.layers))


def _row_bytes(layer, hidden: int, m: int, target) -> int:
    """The largest number of bytes that a layer computes for one row, in a step of m rows."""
    a, wide = layer.attention, [0]
    for block in filter(None, (layer.feed_forward, layer.experts)):
        if isinstance(block, ExpertsConfig):
            # A tile of slots of one expert is half empty on average. A slot has input, activations (2 bytes), output
            slots = block.used + block.count * target.expert_tile(m) / m / 2
            wide.append(int(slots * (6 * hidden + 2 * block.size)))
        else:
            wide.append(4 * block.size)
    if a:
        wide.append(4 * a.head_dim * (a.heads + 2 * a.kv_heads))
    if layer.recurrent:
        wide.append(4 * layer.recurrent.width(hidden))
    return max(wide)
