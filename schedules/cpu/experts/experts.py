"""The matrix products of a mixture of experts on the CPU: the activations of each slot are multiplied by the weights of
the slot's expert. schedules/operators/experts.py defines slots and tiles of slots.

In: activations of slots as in linear.py, in tiles of `tile` slots; `Groups`, or for one row `Ids` in its place; the
planes of stacks: matrices of experts * n rows, n a multiple of 16. Out: the results of live slots; those of other slots
have no meaning.

Several rows: a task is a block of rows of one expert's matrix, for all tiles of slots of this expert, so that weights
are read once. The parallel loop runs over (number of used tiles) * blocks. Each expert has a range of its numbers that
is proportional to its tiles; its tasks are spread evenly over the range, and the other numbers do nothing. So threads
with equal shares of the numbers have equal work. For a tile with few live slots only a part is computed; this is bound
by memory, as one row is, and weights are prefetched.

One row: a task is a block of rows of gate and up for one slot, or a tile of rows of down for all slots. It adds the
slots' results in the order of `Combine`, so that results do not depend on the number of rows.
"""

from collections.abc import Callable
from dataclasses import replace

from tvm import tirx
from tvm.tirx.script import builder as T

from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.cpu import registry
from mlc_amd.schedules.cpu.base.arch import Arch
from mlc_amd.schedules.cpu.base.kernel import kernel
from mlc_amd.schedules.cpu.base.vector import at, f32, registers, splat, store
from mlc_amd.schedules.cpu.linear.linear import TILES, Gated, Results, emit_block, emit_rows
from mlc_amd.schedules.cpu.linear.linear_plan import AnyPlan, default_plan, row_tiles
from mlc_amd.schedules.cpu.linear.linear_tile import Matrix, Packed, TokenTiles, act_params, emit_products, weight_args
from mlc_amd.schedules.cpu.linear.planes import BLOCK, ROWS
from mlc_amd.schedules.cpu.linear.quantize import Output
from mlc_amd.schedules.formats import Format, lookup
from mlc_amd.schedules.operators import ExpertDown, ExpertGateUp, ExpertLinear
from mlc_amd.schedules.tir import Buffer, Expr, declared

ExpertProduct = ExpertGateUp | ExpertLinear


def _stack(op: ExpertProduct, fmt: Format, prefix: str, rows: int = ROWS) -> Matrix:
    """Declares the planes of a stack. Raises UserError unless n is a multiple of `rows`."""
    if op.n % rows:
        raise UserError(f"experts need matrices of a multiple of {rows} rows, this model has {op.n}")
    return weight_args(fmt, op.experts * op.n, op.k, prefix)


def _bias(op: ExpertProduct, name: str) -> Buffer:
    return T.arg(name, T.buffer((op.experts * op.n,), "float32"))


def _groups(op: ExpertProduct) -> Buffer:
    return T.arg("Groups", T.buffer((1, op.used) if op.m == 1 else (op.of.groups(op.m),), "int32"))


def _emit_tasks(op: ExpertProduct, Groups: Buffer, blocks: int, emit: Callable[[Expr, Expr, TokenTiles], None]) -> None:
    """Emits the parallel loop over the tasks: `blocks` blocks of rows of each expert that has pairs. It calls
    emit(expert, block, tiles of slots of the expert)."""
    used_tiles, of = op.of.tiles(op.m), op.of
    with T.parallel(T.Bind(Groups[used_tiles + of.count]) * blocks) as number:
        expert = T.Bind(Groups[number // blocks])
        first = T.Bind(Groups[used_tiles + expert])
        count, place = T.Bind(Groups[used_tiles + expert + 1] - first), T.Bind(number - first * blocks)
        pairs = T.Bind(Groups[used_tiles + of.count + 1 + expert])

        def each(body: Callable[[Expr, Expr], None]) -> None:
            with T.serial(count) as i:
                body(T.Bind(first + i), T.Bind(T.min(pairs - i * of.tile, T.int32(of.tile))))

        with T.If(place % count == 0), T.Then():
            emit(expert, T.Bind(place // count), TokenTiles(count, each))


@registry.builds(ExpertGateUp)
def expert_gate_up(op: ExpertGateUp, arch: Arch, name: str, plan: AnyPlan | None = None) -> tirx.PrimFunc:
    """PrimFunc (state, A, S | X, Groups, planes of gate, planes of up, [GB, UB float32 [experts * n]], then A, S of
    [slots, n] | Y float32 [slots, n]).

    Formats, act and layout as in `gate_up` of linear.py. With op.shared and m = 1 there is one row of activations for
    all slots. Raises UserError unless n is a multiple of 32.
    """
    n, m, of, shared, blocks = op.n, op.m, op.of, op.shared and op.m == 1, op.n // BLOCK
    with kernel(name) as (builder, _):
        params = act_params(op, arch, 1 if shared else of.slots(m), op.k)
        Groups = _groups(op)
        weights = [_stack(op, fmt, prefix, BLOCK) for (fmt, _), prefix in zip(op.weights, ("G_", "U_"), strict=True)]
        added = [_bias(op, which) for which in ("GB", "UB")] if op.biases else []
        output = Output(of.slots(m), n, of.tile, bool(op.layout), "Y", "_out")
        products = replace(emit_products(op, arch, plan, params), shared=shared)

        def emit(expert: Expr, block: Expr, tiles: TokenTiles) -> None:
            bias = (lambda c, i: added[i][at(expert * n + block * BLOCK + c)]) if added else None
            first = T.Bind(expert * (n // ROWS) + block * TILES)
            emit_block(products, weights, first, block, tiles, Gated(output, op.act, bias))

        if m > 1:
            _emit_tasks(op, Groups, blocks, emit)
        else:
            with T.parallel(of.used * blocks) as task:
                slot = T.Bind(task // blocks)
                emit(T.Bind(Groups[0, slot]), T.Bind(task % blocks), TokenTiles(1, lambda body: body(slot, 1)))
    return builder.get()


@registry.builds(ExpertLinear)
def expert_linear(op: ExpertLinear, arch: Arch, name: str, plan: AnyPlan | None = None) -> tirx.PrimFunc:
    """PrimFunc (state, A, S | X, Groups, planes, [WB float32 [experts * n]], Y float32 [slots, n]) for several rows.
    Raises UserError unless n is a multiple of 16."""
    n, slots, fmt, plan = op.n, op.of.slots(op.m), lookup(op.fmt), plan or default_plan(op, arch)
    held = row_tiles(fmt, n, op.k, plan)
    with kernel(name) as (builder, _):
        params, Groups = act_params(op, arch, slots, op.k), _groups(op)
        matrix = _stack(op, fmt, "W_")
        WB: Buffer = _bias(op, "WB") if op.bias else None
        Y = T.arg("Y", T.buffer((slots, n), "float32"))
        products = emit_products(op, arch, plan, params)

        def emit(expert: Expr, block: Expr, tiles: TokenTiles) -> None:
            bias = (lambda column: WB[at(expert * n + column, arch.isa.lanes)]) if op.bias else None
            column = T.Bind(block * held)
            first = T.Bind(expert * (n // ROWS) + column)
            emit_rows(products, matrix, first, held, tiles, Results(Y, column, bias))

        _emit_tasks(op, Groups, n // ROWS // held, emit)
    return builder.get()


@registry.builds(ExpertDown)
def expert_down(op: ExpertDown, arch: Arch, name: str, plan: AnyPlan | None = None) -> tirx.PrimFunc:
    """PrimFunc (state, A, S | X, Groups, planes, [WB float32 [experts * n]], [Weights float32 [1, used]], [R float32
    [1, n]], Y float32 [1, n]) for one row: Y = R + the sum over slots of the slot's result times its weight. Raises
    UserError unless n is a multiple of 16."""
    n, used, lanes = op.n, op.used, arch.isa.lanes
    with kernel(name) as (builder, _):
        params, Groups = act_params(op, arch, used, op.k), _groups(op)
        matrix = _stack(op, lookup(op.fmt), "W_")
        WB = _bias(op, "WB") if op.bias else None
        shapes = {"Weights": (1, used) if op.weighted else None, "R": (1, n) if op.residual else None, "Y": (1, n)}
        Weights, R, Y = declared(**shapes)
        products = emit_products(op, arch, plan, params)
        with T.parallel(n // ROWS) as tile:
            total = registers(ROWS)
            for row in range(0, ROWS, lanes):
                store(total, f32(0.0, lanes), at(row, lanes))
            with T.serial(used) as slot:
                expert = T.Bind(Groups[0, slot])
                weights = Packed(*matrix, T.Bind(expert * (n // ROWS) + tile), arch.isa)

                def add(_: Expr, row: int, x: Expr, expert: Expr = expert, slot: Expr = slot) -> None:
                    if WB is not None:
                        x = x + WB[at(expert * n + tile * ROWS + row, lanes)]
                    if Weights is not None:
                        x = x * splat(Weights[0, slot], lanes)
                    store(total, total[at(row, lanes)] + x, at(row, lanes))

                products.emit_tile(weights, slot, 1, add)
            for row in range(0, ROWS, lanes):
                place = at(tile * ROWS + row, lanes)
                y = total[at(row, lanes)]
                store(Y, y if R is None else R[0, place] + y, 0, place)
    return builder.get()
