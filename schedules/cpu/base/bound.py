"""The roofline of a CPU kernel, measured by two kinds of kernels that do only its memory accesses or only its
arithmetic. They are measured together with the kernel, because the rates of a shared machine change by the minute.

In: a kernel's parameters and its operator. Out (`bounds`): kernels with the same parameters. The slower kind is the
roofline.

    reads         loads every byte of the weights once, or of the keys and values that are attended to, with one more
                  instruction for each vector. There are several variants, of which the fastest counts
    multiplies    the arithmetic, in independent chains, on operands in registers or in the L1 cache. int8 blocks: the
                  dot products, their conversion to float32, and the multiplications by scales. Attention: the two
                  products and, for each vector of scores, a maximum, a difference, 2**x and a sum. SwiGLU: also act(x)
                  * y for each vector of results

They leave out work that depends on shapes: tails, unpacking, masks, storing results.
"""

import functools

from tvm import tirx
from tvm.tirx.script import builder as T

from mlc_amd.schedules.cpu.base.activation import ACTIVATIONS
from mlc_amd.schedules.cpu.base.arch import QUADS
from mlc_amd.schedules.cpu.base.kernel import kernel
from mlc_amd.schedules.cpu.base.vector import LANES, LINE, at, f32, local, pin, prefetch, reduce, splat, store, widen
from mlc_amd.schedules.cpu.linear.load import groups, step
from mlc_amd.schedules.cpu.linear.planes import BLOCK
from mlc_amd.schedules.operators import CausalAttention, ExpertGateUp, ExpertLinear, GateUp, Linear, Operator

AHEAD = (0, 4096, 8192)  # bytes that the variants of `reads` prefetch ahead
CHUNK = 4096  # bytes that a task of `reads` loads
PAGE = 4096  # bytes; `reads` leaves out smaller parameters, which stay in a cache
TASKS = 240  # tasks of `multiplies`; divisible by many numbers of threads
STEPS = 16  # smallest number of steps of a task
REUSE = 16  # steps after which the same activations are loaded again, so that they stay in the L1 cache


def _declare(params):
    """Declares the parameters `params` after `state`: name to buffer, in order."""
    return {p.name: T.arg(p.name, T.buffer(p.shape, p.dtype)) for p in params[1:]}


def bounds(params, op: Operator, isa, name) -> dict[str, list[tirx.PrimFunc]]:
    """Kind to the kernels of this kind. op: a linear layer or attention. params: the parameters of its kernel, Params
    of runtime/measure/candidate.py."""
    return {
        "reads": [reads(params, op, ahead, name) for ahead in AHEAD],
        "multiplies": [multiplies(params, op, isa, name)],
    }


def reads(params, op: Operator, ahead, name) -> tirx.PrimFunc:
    """A kernel that reads all weights, and the part of caches whose keys are attended to. ahead: one of AHEAD."""
    large = [p for p in params if p.role in ("weight", "cache") and p.nbytes >= PAGE]
    with kernel(name) as (builder, _):
        buffers = _declare(params)
        sink = T.decl_buffer((1,), "int32", data=buffers[params[-1].name].data)
        views = [T.decl_buffer((p.nbytes // LINE, LINE // 4), "int32", data=buffers[p.name].data) for p in large]
        with T.attr(T.int32(0), "pragma_parallel_launch_point", 1):
            for p, view in zip(large, views, strict=True):
                lines = p.nbytes // LINE
                weights = T.int32(int(lines * p.share))
                live = weights if p.role == "weight" else _live_keys(buffers["rows"], op) * (lines // op.positions)
                _emit_read(view, live, sink, ahead)
    return builder.get()


def _live_keys(rows, op: Operator):
    """The number of keys that any row of the step attends to. Rows are consecutive tokens of one sequence."""
    keys, span = rows[0, 0] + op.m, op.most_keys
    return T.min(keys, T.int32(span + op.m - 1)) if span else keys


def _emit_read(view, lines, sink, ahead):
    """Emits a parallel loop over tasks of CHUNK bytes; the last task may overlap with the one before."""
    each = CHUNK // LINE
    with T.parallel((lines + each - 1) // each) as task:
        first = T.Bind(T.max(T.min(task * each, lines - each), T.int32(0)))
        sums = [local(LANES, dtype="int32") for _ in range(4)]
        for one in sums:
            store(one, splat(T.int32(0)), at(0))
        with T.serial(T.min(lines, T.int32(each)) // 4) as i:
            for j, one in enumerate(sums):
                line = first + i * 4 + j
                if ahead:
                    prefetch(view, line, 0, ahead=ahead // 4, locality=2)
                store(one, one[at(0)] | view[line, at(0)], at(0))
        both = [sums[i][at(0)] | sums[i + 1][at(0)] for i in (0, 2)]
        # The condition is never true, but LLVM cannot prove it, so it keeps the loads.
        with T.If(reduce("or", T.Bind(both[0] | both[1])) == T.int32(0x5EED)), T.Then():
            store(sink, T.int32(0), 0)


def multiplies(params, op: Operator, isa, name) -> tirx.PrimFunc:
    """A kernel that does the arithmetic of a call."""
    with kernel(name) as (builder, state):
        buffers, result = _declare(params), params[-1]
        sink = T.decl_buffer((result.nbytes // 4,), "float32", data=buffers[result.name].data)
        acts = next(((p, buffers[p.name]) for p in params if p.name == "A"), None)  # only int8 formats have A
        if isinstance(op, CausalAttention):
            m, heads, d, span = op.m, op.layer.heads, op.layer.d, op.layer.span
            pairs = buffers["rows"][0, 0] * m + m * (m + 1) // 2
            pairs = T.min(pairs, T.int32(m * span)) if span else pairs
            _emit_scores(T.Bind(pairs * heads // (isa.lanes * _chains(isa))), 2 * d, state, sink, isa)
        else:
            assert isinstance(op, Linear | GateUp | ExpertGateUp | ExpertLinear)
            rows = op.m * getattr(op, "used", 1)  # rows of results: one for each row and expert that it uses
            with T.attr(T.int32(0), "pragma_parallel_launch_point", 1):
                for fmt, n in op.weights:
                    _emit_weights(fmt, -(-n // isa.lanes) * rows, op.k, state, acts, sink, isa)
                if isinstance(op, GateUp | ExpertGateUp):
                    _emit_activation(ACTIVATIONS[op.act], op.n // isa.lanes * rows // _chains(isa), state, sink, isa)
    return builder.get()


def _chains(isa):
    """The number of independent sums. They hide the latency of an instruction, and leave registers for operands if each
    has an int32 and a float32 register."""
    return isa.registers * 3 // 8


def _emit_fma(sums, factor, lanes):
    for one in sums:
        store(one, one[at(0, lanes)] * factor + f32(0.5, lanes), at(0, lanes))


def _emit_scores(work, products, state, sink, isa):
    """Emits the arithmetic of `work` vectors of scores for each chain: for each vector `products` multiply-adds, then
    the operations of softmax."""
    lanes = isa.lanes
    tasks = T.Bind(T.max(T.min(work // STEPS, T.int32(TASKS)), T.int32(1)))
    steps = T.Bind(work // tasks)
    with T.parallel(tasks) as task:
        scores, factor = _start(state, isa)
        tops, totals = _start(state, isa)[0], _start(state, isa)[0]
        with T.serial(steps):
            with T.serial(products):
                _emit_fma(scores, factor, lanes)
            for score, top, total in zip(scores, tops, totals, strict=True):
                x, before = T.Bind(score[at(0, lanes)]), T.Bind(top[at(0, lanes)])
                store(total, total[at(0, lanes)] + isa.exp2(before - x, lanes), at(0, lanes))
                store(top, T.max(before, x), at(0, lanes))
        _finish([*scores, *tops, *totals], sink, task, lanes)


def _emit_activation(activation, work, state, sink, isa):
    """Emits act(x) * y of `work` vectors for each chain."""
    lanes, tasks = isa.lanes, max(1, min(TASKS, work // STEPS))
    with T.parallel(tasks) as task:
        xs, factor = _start(state, isa)
        totals = _start(state, isa)[0]
        with T.serial(work // tasks):
            _emit_fma(xs, factor, lanes)
            for x, total in zip(xs, totals, strict=True):
                store(total, total[at(0, lanes)] + activation(x[at(0, lanes)], factor, isa, lanes), at(0, lanes))
        _finish([*xs, *totals], sink, task, lanes)


def _start(state, isa):
    """(an accumulator for each chain, a factor that is 1 but that LLVM cannot fold)."""
    lanes, sums = isa.lanes, [local(isa.lanes) for _ in range(_chains(isa))]
    for i, one in enumerate(sums):
        store(one, f32(float(i), lanes), at(0, lanes))
    return sums, splat(T.Bind(T.Cast("float32", T.min(state[1], T.int32(1)))), lanes)


def _finish(sums, sink, task, lanes):
    total = functools.reduce(lambda x, y: T.Bind(x + y), [one[at(0, lanes)] for one in sums])
    places = int(sink.shape[0]) // lanes
    store(sink, total, at(task % places * lanes, lanes))


def _emit_weights(fmt, vectors, k, state, acts, sink, isa):
    """Emits the arithmetic of `vectors` sums over k columns, each for isa.lanes rows and one token."""
    chains, lanes = _chains(isa), isa.lanes
    work = vectors * (k // BLOCK if fmt.kind == "int8" else k) // chains
    tasks = max(1, min(TASKS, work // STEPS))
    if fmt.kind == "float":
        with T.parallel(tasks) as task:
            sums, factor = _start(state, isa)
            with T.serial(work // tasks):
                _emit_fma(sums, factor, lanes)
            _finish(sums, sink, task, lanes)
        return
    param, A = acts
    count = param.nbytes // 4
    quads = T.decl_buffer((count,), "int32", data=A.data)
    codes = T.decl_buffer((param.nbytes,), "uint8", data=A.data)
    steps = next(n for n in (REUSE, 8, 4, 2, 1) if n == 1 or n * chains * QUADS <= count)
    parts, size = groups(fmt), step(fmt, isa)
    more = 1 + (parts if fmt.minimum else 0)  # more multiply-adds: for the activations' scale, and for minimums
    with T.parallel(tasks) as task:
        sums, factor = _start(state, isa)
        dots = [local(lanes, dtype="int32") for _ in range(chains)]
        for one in dots:
            store(one, splat(T.int32(0), lanes), at(0, lanes))
        weights = [pin(codes[at(i * 4, 4 * lanes)], 4 * lanes) for i in range(2)]
        weights = [isa.signed(w) for w in weights] if fmt.signed or fmt.table else weights
        with T.serial(work // tasks) as i:
            base = T.Bind(T.bitwise_and(i, T.int32(steps - 1)) * (chains * QUADS))
            for g in range(parts):
                found = [[one[at(0, lanes)]] for one in dots]
                for j in range(g * QUADS // parts, (g + 1) * QUADS // parts, size):
                    given = [[quads[base + (c * QUADS + j + x) % count] for x in range(size)] for c in range(chains)]
                    found = isa.dot(found, [[weights[(j + x) % 2] for x in range(size)]], given)
                for one, total, dot in zip(dots, sums, found, strict=True):
                    store(one, dot[0], at(0, lanes))
                    store(total, total[at(0, lanes)] + widen(dot[0], lanes) * factor, at(0, lanes))
            for _ in range(more):
                _emit_fma(sums, factor, lanes)
        _finish(sums, sink, task, lanes)
