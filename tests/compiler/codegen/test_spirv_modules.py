"""TensorIR to SPIR-V: whole modules and refusals."""

from dataclasses import replace

import pytest
from samples import sample
from spirv_kernels import (
    counts,
    instructions,
    kernel,
    validate,
)
from tvm.tirx.script import builder as T
from workloads import built, gate_up_op, linear_op

from mlc_amd.compiler.codegen.spirv import compile_spirv, opcodes
from mlc_amd.schedules.gpu.base import device, profiles
from mlc_amd.schedules.gpu.linear import gemm, gemv
from mlc_amd.schedules.operators import Embed, Quantize, RmsNorm
from mlc_amd.schedules.operators.attention import Attention, CausalAttention, Rope, RopeAttention, RopeKvWrite

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


@pytest.mark.parametrize("name", sample(["vangogh", "gfx90c", "lavapipe", "generic"], ["gfx90c", "generic"]))
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


@pytest.mark.parametrize(("dtype", "distance"), [("int64", 1), ("int32", 2)])
def test_volatile_words_are_aligned_pairs(dtype, distance):
    def body(b, _group, i):
        pair = T.Bind(T.call_extern("int64x2", "vk.volatile_load", T.address_of(b.x[i * distance])))
        T.evaluate(T.call_extern("void", "vk.volatile_store", T.address_of(b.x[i * distance]), pair))

    refused("kernel odd: no SPIR-V for volatile access", body, {"x": ((64,), dtype)})


def test_too_much_shared_memory():
    def body(size, dtype):
        def emit(b, _group, i):
            shared = T.alloc_buffer((size,), dtype, scope="shared")
            T.buffer_store(shared, T.cast(b.x[i], dtype), [i])
            device.barrier()
            T.buffer_store(b.x, T.cast(shared[31 - i], "float32"), [i])

        return emit

    refused("kernel odd needs 16388 bytes of LDS .* a workgroup of generic has 16384", body(4097, "float32"))
    # without float16 arithmetic such a buffer holds float32
    refused(
        "kernel odd: no SPIR-V for 20000 bytes of shared memory; a workgroup of generic has 16384",
        body(5000, "float16"),
    )
