"""TensorIR to SPIR-V: memory, control, whole modules and refusals, on Mesa's CPU driver."""

from dataclasses import replace

import numpy as np
import pytest
from spirv_kernels import (
    RNG,
    RUN,
    THREADS,
    compiled,
    counts,
    elementwise,
    execute,
    instructions,
    integers,
    kernel,
    validate,
)
from tvm import tirx
from tvm.tirx.script import builder as T
from workloads import built, gate_up_op, linear_op

from mlc_amd.compiler.codegen.spirv import compile_spirv, opcodes
from mlc_amd.schedules.gpu.base import device, profiles
from mlc_amd.schedules.gpu.base.step import kept
from mlc_amd.schedules.gpu.linear import gemm, gemv
from mlc_amd.schedules.operators import Embed, Quantize, RmsNorm
from mlc_amd.schedules.operators.attention import Attention, CausalAttention, Rope, RopeAttention, RopeKvWrite


@pytest.fixture(params=RUN)
def profile(request):
    return profiles.resolve(request.param)


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


# ---- modules


def builders(profile):
    """Kernels of all kinds, by name."""
    layout, layer, rope = "rows", Attention(8, 2, 64, 512), Rope(True, 64, 0)
    prefill = CausalAttention(layer=layer, m=16, single=0, layout=layout)
    norm = RmsNorm(k=512, m=1, eps=1e-5, layout=layout, rows="all")
    return {
        "embed": lambda: built(Embed(fmt="q4_k", vocab=100, k=512, m=4), profile, "embed"),
        "rms_norm": lambda: built(norm, profile, "rms_norm"),
        "quantize": lambda: built(Quantize(k=512, m=4, layout=layout), profile, "quantize"),
        "gemv": lambda: gemv.linear(
            linear_op([("q4_k", 64), ("q6_k", 32)], 512, 1, layout, (False, True)), profile, "gemv"
        ),
        "gate_up": lambda: gemv.gate_up_swiglu(
            gate_up_op("q4_0", "iq4_nl", 64, 512, 1, layout, layout), profile, "gate_up"
        ),
        "gemm": lambda: gemm.linear(linear_op([("q5_k", 128)], 512, 16, layout, residual=True), profile, "gemm"),
        "gemm_float": lambda: gemm.linear(linear_op([("bf16", 128)], 512, 16, ""), profile, "gemm_float"),
        "rope": lambda: built(RopeKvWrite(layer=Attention(8, 2, 64, 128), m=4, rope=rope), profile, "rope"),
        "decode": lambda: built(RopeAttention(layer=layer, rope=rope, layout=layout, m=1), profile, "decode"),
        "prefill": lambda: built(prefill, replace(profile, matrix=""), "prefill"),
    }


@pytest.mark.parametrize("name", ["vangogh", "gfx90c", "lavapipe", "generic"])
def test_all_kinds_of_kernels_are_valid_and_the_same_each_time(name):
    profile = profiles.resolve(name)
    kernels = {name: make() for name, make in builders(profile).items()}
    first = compile_spirv(kernels, profile)
    for module in first.modules.values():
        validate(module.binary)
        assert module.lds <= profile.lds
    assert set(first.functions) == set(kernels)
    again = {name: make() for name, make in reversed(builders(profile).items())}
    assert compile_spirv(again, profile).modules == first.modules


def test_a_loop_of_matrix_products():
    """C = A B of 16 x 32 x 16 by cooperative matrices: the instructions and the memory model that they want."""

    def body(b, _group, lane):
        shared = T.alloc_buffer((16 * 32,), "float16", scope="shared")
        scopes = {"a": "float16", "b": "float16"}
        fragments = {x: T.alloc_buffer((256,), dtype, scope=f"wmma.matrix_{x}") for x, dtype in scopes.items()}
        sums = T.alloc_buffer((256,), "float32", scope="wmma.accumulator")
        sizes, zero = [T.int32(16)] * 3, T.int32(0)
        with T.serial(16) as i:
            T.buffer_store(shared, b.A[lane + i * 32], [lane + i * 32])
        device.barrier()
        T.evaluate(T.tvm_fill_fragment(sums.data, *sizes, zero, T.float32(0)))
        with T.serial(2) as step:
            for x, source, first in (("a", shared, step * 16), ("b", b.B, step * 256)):
                place, stride = T.address_of(source[first]), T.int32(32 if x == "a" else 16)
                T.evaluate(T.tvm_load_matrix_sync(fragments[x].data, *sizes, zero, place, stride, "row_major"))
            T.evaluate(
                T.tvm_mma_sync(sums.data, zero, fragments["a"].data, zero, fragments["b"].data, zero, sums.data, zero)
            )
        T.evaluate(T.call_extern("void", "fragment_scale", sums.data, zero, T.float32(2)))
        T.evaluate(T.tvm_store_matrix_sync(sums.data, *sizes, zero, T.address_of(b.C[0]), T.int32(16), "row_major"))

    func = kernel({"A": ((512,), "float16"), "B": ((512,), "float16"), "C": ((256,), "float32")}, (1,), (32,), body)
    (module,) = compile_spirv({"test": func}, profiles.resolve("rdna3")).modules.values()
    assert (module.reads, module.writes) == ((0, 1), (2,)) and module.lds == 1024
    assert {"CooperativeMatrixKHR", "VulkanMemoryModel"} <= set(module.capabilities)
    found = counts(module.binary)
    assert (
        found["CooperativeMatrixLoadKHR"],
        found["CooperativeMatrixMulAddKHR"],
        found["CooperativeMatrixStoreKHR"],
    ) == (2, 1, 1)
    assert found["MatrixTimesScalar"] == 1 and found["TypeCooperativeMatrixKHR"] == 3
    assert ("MemoryModel", 5348, 3) in instructions(module.binary)


def test_components_of_fragments():
    """A lane's components in a loop of unknown length: twice each element, in the form in which the accumulator is
    stored."""

    def body(b, _group, lane):
        sums, zero = T.alloc_buffer((256,), "float32", scope="wmma.accumulator"), T.int32(0)
        place = (T.int32(16), T.int32(16), T.int32(16), zero)
        T.evaluate(T.tvm_load_matrix_sync(sums.data, *place, T.address_of(b.C[0]), T.int32(0), "row_major"))
        with T.serial(T.Bind(T.call_extern("int32", "fragment_length", sums.data, zero))) as i:
            value = T.Bind(T.call_extern("float32", "fragment_get", sums.data, zero, i))
            T.evaluate(T.call_extern("void", "fragment_set", sums.data, zero, i, value * 2))
        T.evaluate(T.tvm_store_matrix_sync(sums.data, *place, T.address_of(b.C[0]), T.int32(16), "row_major"))

    func = kernel({"C": ((256,), "float32")}, (1,), (32,), body, coherent=["C"])
    (module,) = compile_spirv({"test": func}, profiles.resolve("nvidia")).modules.values()
    found = instructions(module.binary)
    loaded, stored = (
        next(words for name, *words in found if name == f"CooperativeMatrix{which}KHR") for which in ("Load", "Store")
    )
    masks = loaded[5], stored[4]
    assert [mask & (opcodes.MAKE_POINTER_AVAILABLE | opcodes.MAKE_POINTER_VISIBLE) for mask in masks] == [
        opcodes.MAKE_POINTER_VISIBLE, opcodes.MAKE_POINTER_AVAILABLE
    ]  # fmt: skip
    assert (module.reads, module.writes) == ((0,), (0,))
    assert [name for name, *_ in found if name.startswith("CooperativeMatrix")] == [
        "CooperativeMatrixLoadKHR", "CooperativeMatrixLengthKHR", "CooperativeMatrixStoreKHR"
    ]  # fmt: skip
    assert [words[2] for name, *words in found if name == "LoopMerge"] == [1]


# ---- refusals


def refused(match, body, buffers=None, block=(32,), name="generic"):
    with pytest.raises(ValueError, match=match):
        compile_spirv({"odd": kernel(buffers or {"x": ((32,), "float32")}, (1,), block, body)}, profiles.resolve(name))


def test_refusals_name_the_kernel_and_the_reason():
    refused(
        "kernel odd: no SPIR-V for call of __ocml_exp_f32",
        lambda b, _, i: T.buffer_store(b.x, T.call_extern("float32", "__ocml_exp_f32", b.x[i]), [i]),
    )
    refused(
        "kernel odd: no SPIR-V for float64",
        lambda b, _, i: T.buffer_store(b.x, b.x[i] * 2, [i]),
        {"x": ((32,), "float64")},
    )
    refused(
        "kernel odd: no SPIR-V for an exchange with lanes at distance 32",
        lambda b, _, i: T.buffer_store(b.x, T.call_extern("float32", "vk.shuffle_xor", b.x[i], T.int32(32)), [i]),
    )
    refused(
        "kernel odd has workgroups of 64 threads; at most 32",
        lambda b, _, i: T.buffer_store(b.x, b.x[i], [i]),
        block=(64,),
    )
    refused(
        "kernel odd: no SPIR-V for lanes exchanging values in workgroups of 12 threads, subgroups of 8",
        lambda b, _, i: T.buffer_store(b.x, T.call_extern("float32", "vk.reduce_add", b.x[i]), [i]),
        block=(12,),
        name="lavapipe",
    )


def test_too_much_shared_memory():
    def body(size, dtype):
        def emit(b, _group, i):
            shared = T.alloc_buffer((size,), dtype, scope="shared")
            T.buffer_store(shared, T.cast(b.x[i], dtype), [i])
            device.barrier()
            T.buffer_store(b.x, T.cast(shared[31 - i], "float32"), [i])

        return emit

    refused("kernel odd needs 16388 bytes of LDS .* generic gives a workgroup 16384", body(4097, "float32"))
    # without float16 arithmetic such a buffer holds float32
    refused(
        "kernel odd: no SPIR-V for 20000 bytes of shared memory; generic gives a workgroup 16384", body(5000, "float16")
    )
