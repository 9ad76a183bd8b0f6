"""The memory that a model needs on a target, from its configuration and its tensors alone: nothing is compiled.

In: a model (GGUFModel), a Target, a capacity in tokens. Out: `needs`, as runtime/artifact/memory.py has it of an
artifact, where the buffers are an estimate; and what the cache takes (`kept`, `token_bytes`).
"""

import math

import numpy as np

from mlc_amd.compiler.models.config import ExpertsConfig, ModelConfig
from mlc_amd.compiler.models.graph import table_columns
from mlc_amd.compiler.models.tensors import is_vector
from mlc_amd.runtime.artifact.io_buffers import ROWS
from mlc_amd.runtime.artifact.memory import EXPERTS, Needs
from mlc_amd.runtime.cache.kv_pool import ELEMENTS, MOST_CELLS
from mlc_amd.runtime.cache.pages import STATE
from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.operators.attention import PAGE
from mlc_amd.schedules.operators.layouts import padded

FEWEST_CELLS = 8  # by default, for states of sequences and snapshots of them: two are enough for one sequence

Types = dict[str, tuple[tuple[int, ...], str]]


def needs(model, backend, ctx: int) -> Needs:
    """What the model needs at a capacity of `ctx` tokens."""
    config, experts, weights = model.config, [0] * len(model.config.layers), 0
    for name, tensor in model.tensors.items():
        if name in config.unused:
            continue
        vector = vector_size(model, name)
        planes = {"": ((padded(vector),), "float32")} if vector else _planes(backend, tensor)
        weights += _nbytes(planes)
        if found := EXPERTS.match(name):
            experts[int(found[1])] += _nbytes(planes)
    found, states = kept(config, backend, ctx), backend.state_types(config)
    cells = {name: of for name, of in found.items() if name in states}
    return Needs(
        weights=weights + ctx * _table_bytes(config),
        experts=tuple(experts),
        kv=_nbytes(found),
        token=token_bytes(config, backend, ctx),
        buffers=_buffers(config, backend, ctx),
        context=ctx,
        longest=config.context,
        states=_nbytes(cells),
        cells=next(iter(cells.values()))[0][0] if cells else 0,
    )


def kept(config: ModelConfig, backend, ctx: int) -> Types:
    """What lives from step to step, name to (shape, dtype): the KV cache with pages for one sequence, states of
    sequences, and what attention keeps beside it."""
    spans, longest = backend.spans(config, ctx), max(f.m for f in backend.functions(ctx))
    found = {
        name: ((sequence_pages(spans[name], ctx, longest), *shape[1:]), dtype)
        for name, (shape, dtype) in backend.kv_types(config, ctx).items()
        if spans[name] != STATE
    }
    states = backend.state_types(config)
    if states:
        cells = cell_count(
            _nbytes(found), _nbytes({name: (shape[1:], dtype) for name, (shape, dtype) in states.items()})
        )
        found |= {name: ((cells, *shape[1:]), dtype) for name, (shape, dtype) in states.items()}
    for layer in config.layers:
        found |= backend.workspace(layer, ctx)
    if config.predictor is not None:
        found |= dict.fromkeys(ROWS, ((longest, config.hidden), "float32"))
    return found


def check_capacity(config: ModelConfig, backend, ctx: int) -> None:
    """UserError for a KV cache of which kernels cannot address one tensor."""
    largest = max((math.prod(shape) for shape, _ in kept(config, backend, ctx).values()), default=0)
    if largest > ELEMENTS:
        fitting = ctx * ELEMENTS // largest // PAGE * PAGE
        raise UserError(
            f"--ctx {ctx} is too large: a tensor of the KV cache would have {largest} elements, and kernels address "
            f"{ELEMENTS}; use {fitting} or less"
        )


def cell_count(pages: int, cell: int) -> int:
    """Cells for states beside so many bytes of pages, a cell taking `cell` bytes: as many as take a quarter of what
    pages take, so that snapshots do not decide how much memory a model needs, but enough for a few sequences."""
    return max(FEWEST_CELLS, min(MOST_CELLS, pages // (4 * cell)))


def sequence_pages(span: int, ctx: int, rows: int) -> int:
    """Pages that one sequence of up to `ctx` tokens needs in layers of that span, for steps of up to `rows` rows. With
    a window these are the pages that the next row sees and those of the step's own keys, both with a part of a page at
    each end."""
    window = -(-(span - 1) // PAGE) + 1 + -(-rows // PAGE) + 1
    return min(ctx // PAGE, window) if span else ctx // PAGE


def token_bytes(config: ModelConfig, backend, ctx: int) -> int:
    """What one more token of capacity takes, of the cache without states and of the tables by position."""
    states = backend.state_types(config)
    now, more = (
        _nbytes({name: of for name, of in kept(config, backend, tokens).items() if name not in states})
        for tokens in (ctx, ctx + PAGE)
    )
    return (more - now) // PAGE + _table_bytes(config)


def vector_size(model, name: str) -> int:
    """Numbers of a norm, a bias (of all experts together) or a convolution; 0 for a matrix."""
    shape = model.tensors[name].shape
    return math.prod(shape) if is_vector(name, shape) else 0


def _planes(backend, tensor) -> Types:
    return backend.planes(tensor.format, tensor.rows, tensor.shape[-1])


def _nbytes(types: Types) -> int:
    return sum(math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in types.values())


def _table_bytes(config: ModelConfig) -> int:
    """Of all tables by position (RoPE's angles, in float32), what a token takes."""
    return 4 * sum(table_columns(config).values())


def _buffers(config: ModelConfig, backend, ctx: int) -> int:
    """An estimate, to a third, of the intermediate tensors of the largest step, and of the logits: two rows of hidden
    size are live, and the widest that a layer makes of one."""
    functions = backend.functions(ctx)
    m, logits = max(f.m for f in functions), max(f.logits for f in functions)
    widest = max(_row_bytes(layer, config.hidden, m, backend) for layer in config.layers)
    return m * (2 * 4 * config.hidden + widest) + logits * padded(config.vocab) * 4


def _row_bytes(layer, hidden: int, m: int, backend) -> int:
    """Bytes that a layer makes of one of m rows, at most."""
    a, wide = layer.attention, [0]
    for block in filter(None, (layer.feed_forward, layer.experts)):
        if isinstance(block, ExpertsConfig):
            # tiles of one expert are half empty; each slot has its input and activations (2 bytes) and its output
            slots = block.used + block.count * backend.expert_tile(m) / m / 2
            wide.append(int(slots * (6 * hidden + 2 * block.size)))
        else:
            wide.append(4 * block.size)
    if a:
        wide.append(4 * a.head_dim * (a.heads + 2 * a.kv_heads))
    if layer.recurrent:
        wide.append(4 * layer.recurrent.width(hidden))
    return max(wide)
