"""TensorIR to SPIR-V: memory and control, on Mesa's CPU driver."""

import numpy as np
import pytest
from spirv_kernels import (
    RNG,
    THREADS,
    compiled,
    counts,
    elementwise,
    execute,
    instructions,
    integers,
    kernel,
)
from tvm import tirx
from tvm.tirx.script import builder as T

from mlc_amd.compiler.codegen.spirv import opcodes
from mlc_amd.schedules.gpu.base import device, profiles
from mlc_amd.schedules.gpu.base.step import kept

# ---- memory and control


def strided(offset, width=8):
    """Copies runs of float16 that start `offset` elements after a multiple of 8, one a thread."""
    size = (THREADS + 1) * 8

    def body(b, _group, i):
        T.buffer_store(b.y, b.x[T.ramp(i * 8 + offset, 1, width)], [T.ramp(i * 8 + offset, 1, width)])

    return kernel({"x": ((size,), "float16"), "y": ((size,), "float16")}, (1,), (THREADS,), body)


@pytest.mark.parametrize(("offset", "loads", "alignment"), [(0, 1, 16), (4, 2, 8), (2, 4, 4), (1, 8, 2)])
def test_loads_are_as_wide_as_their_alignment(profile, offset, loads, alignment):
    module = compiled(strided(offset), profile)
    # result type, result, pointer, "Aligned", alignment
    aligned = [words[4] for name, *words in instructions(module.binary) if name == "Load" and len(words) == 5]
    assert len(aligned) == loads and min(aligned) == alignment
    x = RNG(24).standard_normal((THREADS + 1) * 8).astype(np.float16)
    got = execute(strided(offset), {"x": x, "y": np.zeros_like(x)}, profile).y
    end = THREADS * 8 + offset
    assert np.array_equal(got[offset:end], x[offset:end]) and not got[:offset].any() and not got[end:].any()


def test_what_a_kernel_only_reads_says_so(profile):
    module = compiled(strided(0), profile)
    assert (module.reads, module.writes) == ((0,), (1,))
    marked = [words for name, *words in instructions(module.binary) if name == "MemberDecorate"]
    assert len([words for words in marked if words[2:] == [opcodes.DECORATIONS["NonWritable"]]]) == 1


def test_addresses_are_sums_of_shared_and_own_parts():
    """base + zext(workgroup's bytes) + zext(thread's bytes) + constant: two extensions, whatever the index looks
    like."""

    def body(b, group, i):
        row = T.Bind(group * 64)
        for j in range(4):
            T.buffer_store(b.y, b.x[row + i + 16 * j], [row + i + 16 * j])

    func = kernel({"x": ((256,), "float32"), "y": ((256,), "float32")}, (4,), (16,), body)
    found = counts(compiled(func, profiles.resolve("vangogh")).binary)
    assert found["UConvert"] == 2
    x = RNG(25).standard_normal(256).astype(np.float32)
    assert np.array_equal(execute(func, {"x": x, "y": np.zeros_like(x)}, profiles.resolve("lavapipe")).y, x)


def test_negative_terms_of_an_index(profile):
    def body(b, _group, i):
        T.buffer_store(b.y, b.x[THREADS - 1 - i], [i])

    x = integers(np.int32, 26)
    arrays = {"x": x, "y": np.zeros_like(x)}
    got = execute(kernel({n: ((THREADS,), "int32") for n in arrays}, (1,), (THREADS,), body), arrays, profile).y
    assert np.array_equal(got, x[::-1])


def test_more_arguments_than_push_constants(profile):
    names = [f"x{i}" for i in range(profile.arguments)]

    def body(b, _group, i):
        T.buffer_store(b.y, sum((getattr(b, name)[i] for name in names[1:]), getattr(b, names[0])[i]), [i])

    arrays = {name: np.full(THREADS, 2**i, np.int32) for i, name in enumerate(names)} | {
        "y": np.zeros(THREADS, np.int32)
    }
    func = kernel({name: ((THREADS,), "int32") for name in arrays}, (1,), (THREADS,), body)
    assert compiled(func, profile).table
    assert (execute(func, arrays, profile).y == 2 ** len(names) - 1).all()


def test_arms_that_are_not_taken_load_nothing(profile):
    """The branch keeps the load where it is: under a condition, not under a selection of values."""

    def body(b, _group, i):
        T.buffer_store(b.y, T.if_then_else(i < 5, b.x[i], T.int32(-1)), [i])

    x = integers(np.int32, 27, high=5)[:5].copy()
    func = kernel({"x": ((5,), "int32"), "y": ((THREADS,), "int32")}, (1,), (THREADS,), body)
    found = counts(compiled(func, profile).binary)
    assert found["BranchConditional"] == found["Phi"] == 1 and not found["Select"]
    got = execute(func, {"x": x, "y": np.zeros(THREADS, np.int32)}, profile).y
    assert np.array_equal(got, np.concatenate([x, np.full(THREADS - 5, -1)]))


def test_arms_of_registers_are_selected(profile):
    """Lanes that decide differently stay together."""

    def body(b, _group, i):
        cells = T.alloc_buffer((2,), "int32", scope="local")
        T.buffer_store(cells, b.x[i], [0])
        T.buffer_store(cells, b.x[i] * 2, [1])
        T.buffer_store(b.y, T.if_then_else(i % 2 == 0, cells[0], cells[1]), [i])

    x = integers(np.int32, 34, -1000, 1000)
    func = kernel({"x": ((THREADS,), "int32"), "y": ((THREADS,), "int32")}, (1,), (THREADS,), body)
    found = counts(compiled(func, profile).binary)
    assert found["Select"] == 1 and not found["BranchConditional"]
    got = execute(func, {"x": x, "y": np.zeros_like(x)}, profile).y
    assert np.array_equal(got, x * (1 + np.arange(THREADS) % 2))


def test_values_of_before_a_store_stay(profile):
    """A bound load is not repeated after the store that changes what it read, nor used as an index then."""

    def body(b, _group, i):
        old = T.Bind(b.x[i])
        T.buffer_store(b.x, old + 1, [i])
        T.buffer_store(b.y, b.x[i] * 100 + old, [tirx.max(tirx.min(old, THREADS - 1), 0)])

    x = RNG(28).permutation(THREADS).astype(np.int32)
    arrays = {"x": x, "y": np.zeros_like(x)}
    got = execute(kernel({n: ((THREADS,), "int32") for n in arrays}, (1,), (THREADS,), body), arrays, profile)
    order = np.arange(THREADS)
    assert np.array_equal(got.x, x + 1) and np.array_equal(got.y, (order + 1) * 100 + order)


def test_loops_whose_length_the_device_knows(profile):
    """Shared memory turned round in each step, with barriers inside; accumulation in a local array."""

    def body(b, group, i):
        shared = T.alloc_buffer((THREADS,), "int32", scope="shared")
        total = T.alloc_buffer((1,), "int32", scope="local")
        T.buffer_store(total, T.int32(0), [0])
        with T.serial(T.Bind(b.steps[group])) as step:
            T.buffer_store(shared, i * (step + 1), [i])
            device.barrier()
            T.buffer_store(total, total[0] + shared[(i + step) % THREADS], [0])
            device.barrier()
        T.buffer_store(b.y, total[0], [group, i])

    steps = np.array([0, 1, 5], np.int32)
    arrays = {"steps": steps, "y": np.full((3, THREADS), -1, np.int32)}
    func = kernel({n: (x.shape, "int32") for n, x in arrays.items()}, (3,), (THREADS,), body)
    got, i = execute(func, arrays, profile).y, np.arange(THREADS)
    expected = [sum(((i + s) % THREADS * (s + 1) for s in range(n)), np.zeros_like(i)) for n in steps]
    assert np.array_equal(got, np.stack(expected))


def test_loops_that_end_by_a_condition(profile):
    """Each thread another number of steps, also none."""

    def body(b, _group, i):
        left, steps = (T.alloc_buffer((1,), "int32", scope="local") for _ in range(2))
        T.buffer_store(left, b.x[i], [0])
        T.buffer_store(steps, T.int32(0), [0])
        with T.While(left[0] > 1):
            half = T.Bind(T.shift_right(left[0], T.int32(1)))
            T.buffer_store(left, T.Select((left[0] & 1) == 0, half, left[0] * 3 + 1), [0])
            T.buffer_store(steps, steps[0] + 1, [0])
        T.buffer_store(b.y, steps[0], [i])

    def collatz(n):
        count = 0
        while n > 1:
            n, count = (n // 2 if n % 2 == 0 else 3 * n + 1), count + 1
        return count

    arrays = {"x": np.arange(THREADS, dtype=np.int32), "y": np.full(THREADS, -1, np.int32)}
    got = execute(kernel({n: ((THREADS,), "int32") for n in arrays}, (1,), (THREADS,), body), arrays, profile)
    assert got.y.tolist() == [collatz(n) for n in range(THREADS)]


def test_volatile_words(profile):
    """Pairs of 64 bits, each loaded although the same place was loaded before."""

    def body(b, _group, i):
        pairs = [T.Bind(T.call_extern("int64x2", "vk.volatile_load", T.address_of(b.x[2 * i]))) for _ in range(2)]
        turned = T.Shuffle(pairs, [T.int32(1), T.int32(2)])
        T.evaluate(T.call_extern("void", "vk.volatile_store", T.address_of(b.y[2 * i]), turned))

    x = RNG(5).integers(-(1 << 62), 1 << 62, (THREADS, 2))
    arrays = {"x": x, "y": np.zeros_like(x)}
    func = kernel({n: ((THREADS * 2,), "int64") for n in arrays}, (1,), (THREADS,), body)
    module = compiled(func, profile)
    assert (module.reads, module.writes) == ((0,), (1,))
    found = instructions(module.binary)
    accesses = [words[-2:] for name, *words in found if name in ("Load", "Store")]
    assert accesses.count([opcodes.VOLATILE | opcodes.ALIGNED, 16]) == 3
    marked = {words[2] for name, *words in found if name == "MemberDecorate"}
    marks = {opcodes.DECORATIONS[name] for name in ("Coherent", "Volatile", "NonWritable")}
    assert marked & marks == marks - {opcodes.DECORATIONS["NonWritable"]}
    assert np.array_equal(execute(func, arrays, profile).y.reshape(-1, 2), x[:, ::-1])


def test_loops_over_local_arrays_are_to_be_unrolled(profile):
    """Also where an index is bound to a name first; others are left to the driver."""

    def body(b, _group, i):
        cells = T.alloc_buffer((8,), "int32", scope="local")
        with T.serial(8) as j:
            place = T.Bind(7 - j)
            T.buffer_store(cells, b.x[i] * (place + 1), [place])
        with T.serial(8) as j:
            T.buffer_store(b.y, T.int32(0), [i, j])
        with T.serial(8) as j:
            T.buffer_store(b.y, cells[j], [i, j])

    func = kernel({"x": ((THREADS,), "int32"), "y": ((THREADS, 8), "int32")}, (1,), (THREADS,), body)
    hints = [words[2] for name, *words in instructions(compiled(func, profile).binary) if name == "LoopMerge"]
    assert hints == [1, 0, 1]
    x = integers(np.int32, 33, -1000, 1000)
    got = execute(func, {"x": x, "y": np.zeros((THREADS, 8), np.int32)}, profile).y
    assert np.array_equal(got, x[:, None] * np.arange(1, 9))


def test_loops_that_are_to_stay(profile):
    def body(b, _group, i):
        with kept(8) as j:
            T.buffer_store(b.y, i * j, [i, j])

    func = kernel({"y": ((THREADS, 8), "int32")}, (1,), (THREADS,), body)
    assert [words[2] for name, *words in instructions(compiled(func, profile).binary) if name == "LoopMerge"] == [2]
    got = execute(func, {"y": np.zeros((THREADS, 8), np.int32)}, profile).y
    assert np.array_equal(got, np.arange(THREADS)[:, None] * np.arange(8))


@pytest.mark.parametrize(("dtype", "lanes"), [("float16", 8), ("float32", 4), ("float16", 2), ("uint32", 2)])
def test_shared_buffers_of_vectors(profile, dtype, lanes):
    def body(b, _group, i):
        shared = T.alloc_buffer((THREADS,), f"{dtype}x{lanes}", scope="shared")
        T.buffer_store(shared, b.x[i, T.ramp(0, 1, lanes)], [i])
        device.barrier()
        T.buffer_store(b.y, shared[THREADS - 1 - i], [i, T.ramp(0, 1, lanes)])

    x = RNG(29).integers(0, 100, (THREADS, lanes)).astype(dtype)
    func = kernel({"x": (x.shape, dtype), "y": (x.shape, dtype)}, (1,), (THREADS,), body)
    assert compiled(func, profile).lds == x.nbytes
    assert np.array_equal(execute(func, {"x": x, "y": np.zeros_like(x)}, profile).y, x[::-1])


def test_booleans_in_memory(profile):
    x = integers(np.int32, 30)
    less = elementwise(profile, lambda v: v < 0, x, out=np.bool_)
    assert np.array_equal(less, x < 0)
    assert np.array_equal(
        elementwise(profile, lambda v: T.Select(v, T.int32(3), T.int32(4)), less, out=np.int32), np.where(x < 0, 3, 4)
    )


def test_the_last_workgroup_sees_what_all_wrote(profile):
    """Sums through coherent memory and an atomic counter, in one launch."""
    groups = 50

    def body(b, group, i):
        T.buffer_store(b.parts, b.x[group, i] * 2, [group, i])
        T.evaluate(T.call_extern("void", "vk.memory_barrier"))
        old, total = T.alloc_buffer((1,), "int32", scope="shared"), T.alloc_buffer((1,), "int32", scope="local")
        device.barrier()
        with T.If(i == 0), T.Then():
            T.buffer_store(old, T.call_intrin("int32", "tirx.atomic_add", T.address_of(b.arrived[0]), T.int32(1)), [0])
        device.barrier()
        last = T.Bind(old[0] == groups - 1)
        with T.If(last), T.Then():
            T.buffer_store(total, T.int32(0), [0])
            with T.serial(groups) as g:
                T.buffer_store(total, total[0] + b.parts[g, i], [0])
            T.buffer_store(b.y, total[0], [i])

    x = RNG(31).integers(-1000, 1000, (groups, THREADS)).astype(np.int32)
    arrays = {"x": x, "parts": np.zeros_like(x), "arrived": np.zeros(1, np.int32), "y": np.zeros(THREADS, np.int32)}
    func = kernel(
        {n: (a.shape, "int32") for n, a in arrays.items()}, (groups,), (THREADS,), body, coherent=["parts", "arrived"]
    )
    module = compiled(func, profile)
    marked = [words[2] for name, *words in instructions(module.binary) if name == "MemberDecorate"]
    assert opcodes.DECORATIONS["Coherent"] in marked
    got = execute(func, arrays, profile)
    assert got.arrived[0] == groups and np.array_equal(got.y, 2 * x.sum(0))
