"""TensorIR to SPIR-V: arithmetic, against numpy on Mesa's CPU driver."""

import numpy as np
import pytest
from spirv_kernels import RNG, THREADS, dtype_of, elementwise, execute, integers, kernel
from tvm import tirx
from tvm.tirx.script import builder as T

from mlc_amd.schedules.gpu.base import device, profiles

# ---- arithmetic


@pytest.mark.parametrize("by", [7, -7, 8, 1])
def test_division_by_constants(profile, by):
    a, n = integers(np.int32), T.int32(by)
    a[:4] = (-7, 7, -8, 0)
    assert np.array_equal(elementwise(profile, lambda x: tirx.floordiv(x, n), a), a // by)
    assert np.array_equal(elementwise(profile, lambda x: tirx.floormod(x, n), a), a % by)
    assert np.array_equal(elementwise(profile, lambda x: tirx.truncmod(x, n), a), np.fmod(a, by))
    assert np.array_equal(elementwise(profile, lambda x: tirx.truncdiv(x, n), a), np.trunc(a / by).astype(np.int32))


def test_division_by_values(profile):
    a, b = integers(np.int32, 1), integers(np.int32, 2, -50, 50)
    b[b == 0] = 3
    assert np.array_equal(elementwise(profile, tirx.floordiv, a, b), a // b)
    assert np.array_equal(elementwise(profile, tirx.floormod, a, b), a % b)
    a, b = a.view(np.uint32), np.abs(b).astype(np.uint32)
    assert np.array_equal(elementwise(profile, tirx.floordiv, a, b), a // b)
    assert np.array_equal(elementwise(profile, tirx.floormod, a, b), a % b)


@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.int8, np.uint8, np.int16, np.uint16])
def test_integers_wrap_around(dtype):
    profile = profiles.resolve("lavapipe")
    a, b = integers(dtype, 3), integers(dtype, 4)
    by = integers(dtype, 5, 0, 7)

    def results(x, y, shift):
        bits = [x & y, x | y, x ^ y, ~x, x << shift, x >> shift]
        return [x + y, x - y, x * y, *bits, tirx.min(x, y), tirx.max(x, y), tirx.Select(x < y, x, y)]

    names = {"a": a, "b": b, "by": by}
    out = np.zeros((len(results(*(T.int32(i) for i in (1, 2, 3)))), THREADS), dtype)

    def body(buffers, _group, i):
        for j, value in enumerate(results(*(T.Bind(getattr(buffers, name)[i]) for name in names))):
            T.buffer_store(buffers.out, value, [j, i])

    arrays = names | {"out": out}
    got = execute(
        kernel({n: (x.shape, dtype_of(x)) for n, x in arrays.items()}, (1,), (THREADS,), body), arrays, profile
    ).out
    expected = [
        a + b,
        a - b,
        a * b,
        a & b,
        a | b,
        a ^ b,
        ~a,
        a << by,
        a >> by,
        np.minimum(a, b),
        np.maximum(a, b),
        np.where(a < b, a, b),
    ]
    assert np.array_equal(got, np.stack(expected))


@pytest.mark.parametrize("source", [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32])
@pytest.mark.parametrize("target", [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.float32])
def test_casts_of_integers(source, target):
    a = integers(source, 6)
    got = elementwise(profiles.resolve("generic"), lambda x: T.cast(x, np.dtype(target).name), a, out=target)
    assert np.array_equal(got, a.astype(target))


def test_casts_of_floats(profile):
    x = RNG(7).uniform(-127.9, 127.9, THREADS).astype(np.float32)
    for target in (np.int8, np.int16, np.int32):
        assert np.array_equal(
            elementwise(profile, lambda v, t=target: T.cast(v, np.dtype(t).name), x, out=target), x.astype(target)
        )
    for target in (np.uint8, np.uint16, np.uint32):
        got = elementwise(profile, lambda v, t=target: T.cast(v, np.dtype(t).name), abs(x), out=target)
        assert np.array_equal(got, abs(x).astype(target))
    big = np.full(THREADS, 3e9, np.float32)
    assert np.array_equal(
        elementwise(profile, lambda v: T.cast(v, "uint32"), big, out=np.uint32), big.astype(np.uint32)
    )


def test_float16_is_rounded_to_even_with_small_numbers(profile):
    x = np.ldexp(RNG(8).uniform(1, 2, THREADS), RNG(9).integers(-26, 16, THREADS)).astype(np.float32)
    x[:6] = (1 + 2**-11, 1 + 3 * 2**-11, 2**-25, 1.5 * 2**-24, -(2**-24), 65519)
    rounded = x.astype(np.float16)
    assert np.array_equal(elementwise(profile, lambda v: T.cast(v, "float16"), x, out=np.float16), rounded)
    again = elementwise(profile, lambda v: T.cast(T.cast(v, "float16"), "float32"), x)
    assert np.array_equal(again, rounded.astype(np.float32))
    bits = elementwise(
        profile, lambda v: T.cast(T.reinterpret("uint16", T.cast(v, "float16")), "int32"), x, out=np.int32
    )
    assert np.array_equal(bits, rounded.view(np.uint16).astype(np.int32))


def test_float16_arithmetic(profile):
    a, b = (RNG(i).standard_normal((THREADS, 8)).astype(np.float16) for i in (10, 11))

    def body(buffers, _group, i):
        x, y = (T.Bind(buffer[i, T.ramp(0, 1, 8)]) for buffer in (buffers.a, buffers.b))
        T.buffer_store(buffers.out, x * y + x, [i, T.ramp(0, 1, 8)])

    arrays = {"a": a, "b": b, "out": np.zeros_like(a)}
    got = execute(
        kernel({n: (x.shape, dtype_of(x)) for n, x in arrays.items()}, (1,), (THREADS,), body), arrays, profile
    ).out
    exact = a.astype(np.float64) * b + a
    assert abs(got - exact).max() < 2**-9 * abs(exact).max()


@pytest.mark.parametrize(
    ("op", "reference"),
    [
        (device.exp2, np.exp2),
        (device.rsqrt, lambda x: 1 / np.sqrt(abs(x))),
        (device.rcp, lambda x: 1 / x),
        (device.rint, np.rint),
        (T.exp, np.exp),
        (T.fabs, np.abs),
        (T.floor, np.floor),
        (T.sigmoid, lambda x: 1 / (1 + np.exp(-x))),
    ],
)
def test_functions_of_one_number(profile, op, reference):
    x = RNG(12).uniform(-20, 20, THREADS).astype(np.float32)
    x[:4] = (0.5, 1.5, -2.5, 3.5)
    x = abs(x) if op is device.rsqrt else x
    np.testing.assert_allclose(elementwise(profile, op, x), reference(x.astype(np.float64)), rtol=2e-6)


def test_the_other_one_of_a_number_and_none(profile):
    x, y = (RNG(i).standard_normal(THREADS).astype(np.float32) for i in (13, 14))
    x[0], y[1] = np.nan, np.nan
    assert np.array_equal(elementwise(profile, device.maximum, x, y), np.fmax(x, y))
    assert np.array_equal(elementwise(profile, device.minimum, x, y), np.fmin(x, y))


def test_multiply_add(profile):
    x, y, z = (RNG(i).standard_normal(THREADS).astype(np.float32) for i in (15, 16, 17))
    # drivers may round twice
    np.testing.assert_allclose(
        elementwise(profile, device.fma, x, y, z), x.astype(np.float64) * y + z, rtol=1e-6, atol=1e-6
    )


def test_dot_products_of_bytes(profile):
    a, b = integers(np.int32, 18), integers(np.int32, 19)
    expected = (a.view(np.int8).astype(np.int32) * b.view(np.int8)).reshape(-1, 4).sum(1)
    assert np.array_equal(elementwise(profile, lambda x, y: T.call_extern("int32", "vk.dot4", x, y), a, b), expected)
    assert np.array_equal(elementwise(profile, lambda x, y: device.dot4(profile, x, y, T.int32(5)), a, b), expected + 5)


@pytest.mark.parametrize("selector", [0x03020100, 0x07060504, 0x00050206, 0x0C040C01])
def test_byte_permutes(profile, selector):
    high, low = integers(np.uint32, 20), integers(np.uint32, 21)
    table = np.concatenate(
        [low.view(np.uint8).reshape(-1, 4), high.view(np.uint8).reshape(-1, 4), np.zeros((THREADS, 8), np.uint8)], 1
    )
    expected = np.ascontiguousarray(table[:, [selector >> 8 * i & 255 for i in range(4)]]).view(np.uint32).ravel()
    call = ("uint32", "llvm.amdgcn.perm")
    assert np.array_equal(
        elementwise(profile, lambda x, y: T.call_llvm_intrin(*call, x, y, T.uint32(selector)), high, low), expected
    )
    if selector & 0x0C0C0C0C == selector & 0x04040404:  # by value only the eight bytes
        chosen = np.full(THREADS, selector, np.uint32)
        assert np.array_equal(
            elementwise(profile, lambda x, y, s: T.call_llvm_intrin(*call, x, y, s), high, low, chosen), expected
        )


@pytest.mark.parametrize("dtype", ["float16", "int8", "uint8", "int16", "uint16"])
def test_words_reinterpreted(profile, dtype):
    """A word as its parts, as numbers, and back."""
    words, lanes = integers(np.uint32, 22), 4 // np.dtype(dtype).itemsize
    if dtype == "float16":
        words = RNG(23).standard_normal(2 * THREADS).astype(np.float16).view(np.uint32)

    def body(b, _group, i):
        parts = T.Bind(T.reinterpret(f"{dtype}x{lanes}", b.words[i]))
        for j in range(lanes):
            T.buffer_store(b.numbers, T.cast(T.Shuffle([parts], [j]), "float32"), [i, j])
        T.buffer_store(b.again, T.reinterpret("uint32", T.Shuffle([parts], list(range(lanes)))), [i])

    arrays = {"words": words, "numbers": np.zeros((THREADS, lanes), np.float32), "again": np.zeros_like(words)}
    func = kernel({n: (x.shape, dtype_of(x)) for n, x in arrays.items()}, (1,), (THREADS,), body)
    got = execute(func, arrays, profile)
    assert np.array_equal(got.numbers, words.view(dtype).reshape(-1, lanes).astype(np.float32))
    assert np.array_equal(got.again, words)
