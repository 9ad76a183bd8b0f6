"""The kernel of `CompressedAttention` on the CPU (schedules/operators/indexer.py)."""

from tvm import tirx
from tvm.tirx.script import builder as T

from mlc_amd.schedules.cpu import registry
from mlc_amd.schedules.cpu.attention.cache import BLOCK, RowTable
from mlc_amd.schedules.cpu.attention.selected import MAX_HEADS, each_new_key, emit_head, store_key
from mlc_amd.schedules.cpu.base.arch import Arch
from mlc_amd.schedules.cpu.base.kernel import kernel, live_rows
from mlc_amd.schedules.cpu.base.vector import LANES, at, f32, largest_divisor, opaque, registers, store
from mlc_amd.schedules.operators.attention import LOG2E, SLOTS
from mlc_amd.schedules.operators.indexer import CompressedAttention
from mlc_amd.schedules.tir import Expr, declared


@registry.builds(CompressedAttention)
def compressed_attention(op: CompressedAttention, arch: Arch, name: str, plan: None = None) -> tirx.PrimFunc:
    """Kernel (state int32[4], rows, pages, Q, K, [C, [Ids]], Sinks, Kc, [Cc], Y). A task computes some heads of a row.
    It copies each block of keys to a buffer, for all its heads."""
    of, isa, d, ratio = op.layer, arch.isa, op.layer.d, op.ratio
    heads = largest_divisor(MAX_HEADS, of.heads)
    parts = of.heads // heads
    with kernel(name) as (builder, state):
        rows, pages = RowTable(op.m), T.arg("pages", T.buffer((SLOTS, of.blocks), "int32"))
        Q, K, C = declared(**op.inputs)
        (Ids,), (Sinks,) = declared("int32", Ids=(op.m, op.used) if op.used else None), declared(Sinks=(of.heads,))
        Kc, Cc = declared("float16", Kc=op.caches["wk"], Cc=op.caches.get("ck"))
        (Y,) = declared(Y=(op.m, of.heads * d))
        live = live_rows(state, op.m)
        with each_new_key(rows, pages, live, of.ctx) as (row, page, last):
            store_key(Kc, K, row, page, last % BLOCK)
            if ratio:
                with T.If((last + 1) % ratio == 0), T.Then():
                    store_key(Cc, C, row, page, last % BLOCK // ratio)
        with T.parallel(live * parts) as task:
            row, first = opaque(task // parts), opaque(task % parts * heads)
            last, slot = opaque(rows.clamped(row, of.ctx)), opaque(rows.slot(row))
            keys, scores = T.alloc_buffer((BLOCK, d), "float32"), registers(BLOCK)
            out, tops, totals = T.alloc_buffer((heads, d), "float32"), registers(heads), registers(heads)
            near = registers(1, kind="int32")
            with T.serial(heads) as r:
                store(tops, Sinks[first + r] * T.float32(LOG2E), r)
                store(totals, T.float32(1), r)
                with T.serial(d // LANES) as c:
                    store(out, f32(0.0), r, at(c * LANES))

            def gather(cache, position: Expr, place: Expr) -> None:
                page = opaque(pages[slot, position // BLOCK])
                with T.serial(d // LANES) as c:
                    store(keys, isa.half(cache[page, place, at(c * LANES)], LANES), near[0], at(c * LANES))
                store(near, near[0] + 1, 0)

            def attend() -> None:
                with T.If(near[0] > 0), T.Then(), T.serial(heads) as r:
                    count = opaque(near[0])
                    emit_head(of, isa, (Q, row, first + r), (keys, keys, scores, count), (out, tops, totals), r)

            def each_block(count: Expr, emit) -> None:
                with T.serial((count + BLOCK - 1) // BLOCK) as block:
                    store(near, T.int32(0), 0)
                    with T.serial(T.min(count - block * BLOCK, T.int32(BLOCK))) as i:
                        emit(block * BLOCK + i)
                    attend()

            def window(number: Expr) -> None:
                position = opaque(last - number)
                gather(Kc, position, position % BLOCK)

            def compressed(number: Expr) -> None:
                position = opaque(Ids[row, number] if op.used else (number + 1) * ratio - 1)
                with T.If(tirx.all(position >= 0, position <= last, (position + 1) % ratio == 0)), T.Then():
                    gather(Cc, position, position % BLOCK // ratio)

            each_block(opaque(T.min(last + 1, T.int32(of.window))), window)
            if ratio:
                each_block(T.int32(op.used) if op.used else opaque((last + 1) // ratio), compressed)
            with T.serial(heads) as r:
                inverse = T.Bind(T.float32(1) / totals[r])
                with T.serial(d) as c:
                    store(Y, out[r, c] * inverse, row, (first + r) * d + c)
    return builder.get()
