"""TensorIR to AMD code objects: launches, arguments, refusals, barriers, and the device intrinsics, run in the ISA
emulator where it is."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import tvm
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from mlc_amd.compiler.codegen import hsaco, rocm
from mlc_amd.compiler.codegen.lower import lower, walk
from mlc_amd.compiler.codegen.rocm import compile_hsaco, rocm_target, values_in_memory
from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.gpu.base import device
from mlc_amd.schedules.gpu.base.arch import ARCHS, resolve
from tests.dev.gfxemu import emulate

EMULATED = ("gfx1100", "gfx1201", "gfx942")


@pytest.fixture(params=EMULATED)
def arch(request):
    return resolve(request.param)


def kernel(buffers, grid, block, body, scratch=None):
    """A PrimFunc: `buffers` name: (shape, dtype); `body(buffers as attributes, *axes)` emits the kernel."""
    with IRBuilder() as ir, T.prim_func(s_tir=True):
        T.func_name("test")
        T.func_attr({"tirx.noalias": True, "global_symbol": "test"})
        made = SimpleNamespace(
            **{name: T.arg(name, T.buffer(shape, dtype)) for name, (shape, dtype) in buffers.items()}
        )
        with device.launch(grid, block) as axes:
            body(made, *axes)
    return ir.get()


def elementwise(arch, op, *inputs):
    """The result of the float32 or int32 device function `op(arch, *values)` on arrays of one wave, in the emulator."""
    shape = (arch.wave,)
    inputs = {f"I{i}": np.ascontiguousarray(x) for i, x in enumerate(inputs)}
    out = np.zeros(shape, next(iter(inputs.values())).dtype if len(inputs) < 3 else inputs["I2"].dtype)
    buffers = {name: (shape, str(x.dtype)) for name, x in (inputs | {"out": out}).items()}

    def body(b, _group, lane):
        T.buffer_store(b.out, op(arch, *(getattr(b, name)[lane] for name in inputs)), [lane])

    emulate(compile_hsaco({"op": kernel(buffers, (1,), shape, body)}, arch), "op", inputs | {"out": out})
    return out


def reverse_groups(n, apart=1):
    """Each workgroup of n threads writes its inputs in reverse order: through LDS, across waves, `apart` floats
    apart."""

    def body(b, group, thread):
        shared = T.alloc_buffer((n * apart,), "float32", scope="shared")
        T.buffer_store(shared, b.X[group, thread], [thread * apart])
        device.barrier()
        T.buffer_store(b.Y, shared[(n - 1 - thread) * apart], [group, thread])

    return kernel({"X": ((2, n), "float32"), "Y": ((2, n), "float32")}, (2,), (n,), body)


# ---- compilation


@pytest.mark.parametrize("name", ARCHS)
def test_every_arch_compiles_with_a_wait_before_the_barrier(name):
    module = compile_hsaco({"reverse": reverse_groups(256)}, ARCHS[name])
    code = hsaco.parse(module.hsaco)
    assert code.machine == name
    assert code.kernels["reverse_kernel"].wave == ARCHS[name].wave
    lines = [line.strip() for line in module.assembly.splitlines()]
    barrier = next(i for i, line in enumerate(lines) if line.startswith(("s_barrier_signal", "s_barrier")))
    write = max(i for i in range(barrier) if lines[i].startswith("ds_"))
    assert any(line in ("s_wait_dscnt 0x0", "s_waitcnt lgkmcnt(0)") for line in lines[write:barrier])


@pytest.mark.full
@pytest.mark.emulator
@pytest.mark.parametrize("order", ["fwd", "rev", 3])
def test_barrier(arch, order):
    x = np.random.default_rng(0).standard_normal((2, 256)).astype(np.float32)
    y = np.zeros_like(x)
    emulate(compile_hsaco({"reverse": reverse_groups(256)}, arch), "reverse", {"X": x, "Y": y}, wave_order=order)
    assert np.array_equal(y, x[:, ::-1])


def reordered(arch):
    """A module whose function copies four buffers, and their names in the order of the arguments."""
    names = ("zeta", "alpha", "Mid", "beta")
    buffers = {name: ((32,), "float32") for name in names} | {"Aout": ((4, 32), "float32")}

    def body(b, _group, thread):
        for i, name in enumerate(names):
            T.buffer_store(b.Aout, getattr(b, name)[thread], [i, thread])

    module = compile_hsaco({"copy": kernel(buffers, (1,), (32,), body)}, arch)
    return module, names


def test_arguments_are_bound_although_tvm_reorders_them(arch):
    module, names = reordered(arch)
    function = module.functions["copy"]
    (launch,) = function.launches
    assert function.params == (*names, "Aout")
    in_code = [arg.name for arg in hsaco.parse(module.hsaco).kernels[launch.symbol].args if arg.kind == "global_buffer"]
    assert [function.params[i] for i in launch.args] == [name.removesuffix("_ptr") for name in in_code]
    assert launch.args != tuple(range(5))


@pytest.mark.full
@pytest.mark.emulator
def test_bound_arguments_reach_the_kernel(arch):
    module, names = reordered(arch)
    arrays = {name: np.full(32, i + 1, np.float32) for i, name in enumerate(names)} | {
        "Aout": np.zeros((4, 32), np.float32)
    }
    emulate(module, "copy", arrays)
    assert arrays["Aout"].tolist() == [[i + 1.0] * 32 for i in range(4)]


def two_kernels():
    """Y = 2 * X + 1 + X in two launches with two buffers between them."""
    with IRBuilder() as ir, T.prim_func(s_tir=True):
        T.func_name("test")
        T.func_attr({"tirx.noalias": True, "global_symbol": "test"})
        X, Y = (T.arg(name, T.buffer((128,), "float32")) for name in "XY")
        twice, same = (T.alloc_buffer((n,), "float32", scope="global") for n in (128, 256))
        with device.launch((2,), (64,)) as (group, thread):
            T.buffer_store(twice, X[group * 64 + thread] * T.float32(2), [group * 64 + thread])
            T.buffer_store(same, X[group * 64 + thread], [254 - 2 * (group * 64 + thread)])
        with device.launch((4,), (32,)) as (group, thread):
            i = T.Bind(group * 32 + thread)
            T.buffer_store(Y, twice[i] + T.float32(1) + same[254 - 2 * i], [i])
    return ir.get()


@pytest.mark.full
@pytest.mark.emulator
def test_a_function_of_two_kernels_and_several_functions_in_a_code_object(arch):
    module = compile_hsaco({"two": two_kernels(), "reverse": reverse_groups(64)}, arch)
    assert set(module.functions) == {"two", "reverse"}
    two = module.functions["two"]
    assert two.scratch == (512, 1024)
    assert [(step.grid, step.block) for step in two.launches] == [((2, 1, 1), (64, 1, 1)), ((4, 1, 1), (32, 1, 1))]
    assert set(hsaco.parse(module.hsaco).kernels) == {
        step.symbol for f in module.functions.values() for step in f.launches
    }
    x, y = np.arange(128, dtype=np.float32), np.zeros(128, np.float32)
    emulate(module, "two", {"X": x, "Y": y})
    assert np.array_equal(y, 3 * x + 1)


def test_threads_may_compile_at_the_same_time():
    names = ["gfx1100", "gfx1030", "gfx942", "gfx1201"] * 2
    with ThreadPoolExecutor(4) as pool:
        modules = list(pool.map(lambda name: compile_hsaco({"reverse": reverse_groups(128)}, ARCHS[name]), names))
    assert [hsaco.parse(module.hsaco).machine for module in modules] == names


# ---- refusals, before LLVM or the linker fails


def test_too_much_lds():
    with pytest.raises(ValueError, match=r"needs 66560 bytes of LDS .* a workgroup of gfx1100 has 65536"):
        compile_hsaco({"big": reverse_groups(256, apart=65)}, ARCHS["gfx1100"])
    assert (
        hsaco.parse(compile_hsaco({"big": reverse_groups(256, apart=65)}, ARCHS["gfx950"]).hsaco)
        .kernels["big_kernel"]
        .lds
        == 66560
    )


def test_too_many_threads():
    with pytest.raises(ValueError, match="workgroups of 512 threads; at most 256"):
        compile_hsaco({"wide": reverse_groups(512)}, ARCHS["gfx1100"])


def test_no_threads():
    with IRBuilder() as ir, T.prim_func(s_tir=True):
        T.func_name("test")
        T.func_attr({"tirx.noalias": True})
        T.arg("X", T.buffer((8,), "float32"))
        T.evaluate(T.int32(0))
    with pytest.raises(ValueError, match="no threads: bind its loops"):
        compile_hsaco({"host": ir.get()}, ARCHS["gfx1100"])


def test_no_linker(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(rocm.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"no ld.lld found.*pip install 'mlc-amd\[rocm\]'"):
        compile_hsaco({"reverse": reverse_groups(64)}, ARCHS["gfx1100"])


def test_linker_that_is_too_old(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/ld.lld" if name == "ld.lld" else None)
    monkeypatch.setattr(rocm.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(rocm, "linker_version", lambda command: 14)
    with pytest.raises(UserError, match=r"too old.*lld 15 or newer"):
        rocm.find_linker()


def test_missing_functions_are_named():
    def body(b, _group, thread):
        T.buffer_store(b.X, T.call_extern("float32", "__ocml_exp_f32", b.X[thread]), [thread])

    with pytest.raises(ValueError, match=r"cannot use functions of ROCm's device library.*__ocml_exp_f32"):
        compile_hsaco({"exp": kernel({"X": ((64,), "float32")}, (1,), (64,), body)}, ARCHS["gfx1100"])


# ---- device intrinsics


def words(rng, n):
    return rng.integers(-(2**31), 2**31, n).astype(np.int32)


@pytest.mark.full
@pytest.mark.emulator
def test_dot4(arch):
    rng = np.random.default_rng(1)
    a, b, c = (words(rng, arch.wave) for _ in range(3))
    c //= 2**10
    expected = (a.view(np.int8).astype(np.int32) * b.view(np.int8)).reshape(-1, 4).sum(1) + c
    assert np.array_equal(elementwise(arch, device.dot4, a, b, c), expected)


@pytest.mark.full
@pytest.mark.emulator
def test_dot4_without_an_instruction_for_it():
    rng = np.random.default_rng(2)
    plain, run_on = ARCHS["gfx1010"], ARCHS["gfx1100"]  # the emulator does not know gfx10
    a, b, c = (words(rng, run_on.wave) for _ in range(3))
    c //= 2**10
    expected = (a.view(np.int8).astype(np.int32) * b.view(np.int8)).reshape(-1, 4).sum(1) + c
    assert np.array_equal(elementwise(run_on, lambda _, *values: device.dot4(plain, *values), a, b, c), expected)


@pytest.mark.full
@pytest.mark.emulator
@pytest.mark.parametrize("plain", [False, True])
def test_dot2(arch, plain):
    rng = np.random.default_rng(3)
    a, b = (rng.standard_normal((arch.wave, 2)).astype(np.float16) for _ in range(2))
    c = rng.standard_normal(arch.wave).astype(np.float32)
    got = elementwise(
        arch,
        lambda arch, *values: device.dot2(ARCHS["gfx1010"] if plain else arch, *values),
        a.view(np.int32).ravel(),
        b.view(np.int32).ravel(),
        c,
    )
    np.testing.assert_allclose(got, (a.astype(np.float32) * b.astype(np.float32)).sum(1) + c, rtol=1e-5, atol=1e-6)


@pytest.mark.full
@pytest.mark.emulator
@pytest.mark.parametrize(
    ("op", "reference", "low", "high"),
    [
        (device.exp2, np.exp2, -100, 100),
        (device.rsqrt, lambda x: 1 / np.sqrt(x), 1e-6, 1e6),
        (device.rcp, lambda x: 1 / x, 1e-6, 1e6),
        (device.rint, np.rint, -200, 200),
    ],
)
def test_functions_of_one_number(arch, op, reference, low, high):
    x = np.random.default_rng(4).uniform(low, high, arch.wave).astype(np.float32)
    x[:4] = np.rint(x[:4]) + 0.5
    np.testing.assert_allclose(elementwise(arch, lambda _, value: op(value), x), reference(x), rtol=3e-7)


@pytest.mark.full
@pytest.mark.emulator
def test_maximum_minimum_fma(arch):
    rng = np.random.default_rng(5)
    x, y, z = (rng.standard_normal(arch.wave).astype(np.float32) for _ in range(3))
    x[0] = np.nan
    assert np.array_equal(elementwise(arch, lambda _, a, b: device.maximum(a, b), x, y), np.fmax(x, y))
    assert np.array_equal(elementwise(arch, lambda _, a, b: device.minimum(a, b), x, y), np.fmin(x, y))
    x[0] = 1
    got = elementwise(arch, lambda _, a, b, c: device.fma(a, b, c), x, y, z)
    assert np.array_equal(got, (x.astype(np.float64) * y + z).astype(np.float32))


@pytest.mark.full
@pytest.mark.emulator
@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.uint32])
def test_shuffles(arch, dtype):
    """All XOR distances, an arbitrary permutation, and the value of the first lane."""
    wave, masks = arch.wave, range(1, arch.wave)
    x = np.arange(100, 100 + wave).astype(dtype)
    got = np.zeros((len(masks) + 2, wave), dtype)

    def body(b, _group, lane):
        value = T.Bind(b.X[lane])
        for i, mask in enumerate(masks):
            T.buffer_store(b.Y, device.shuffle_xor(arch, value, mask), [i, lane])
        T.buffer_store(b.Y, device.shuffle(arch, value, (device.lane_id(arch) * 5 + 3) % wave), [len(masks), lane])
        T.buffer_store(b.Y, device.uniform(arch, value), [len(masks) + 1, lane])

    name = np.dtype(dtype).name
    func = kernel({"X": ((wave,), name), "Y": (got.shape, name)}, (1,), (wave,), body)
    emulate(compile_hsaco({"shuffle": func}, arch), "shuffle", {"X": x, "Y": got})
    lanes = np.arange(wave)
    assert np.array_equal(got[: len(masks)], x[lanes ^ np.array(masks)[:, None]])
    assert np.array_equal(got[-2], x[(lanes * 5 + 3) % wave])
    assert np.array_equal(got[-1], np.full(wave, x[0]))


def test_no_partner_outside_the_wave():
    with pytest.raises(ValueError, match="no lane of a wave of 32"):
        device.shuffle_xor(ARCHS["gfx1100"], T.float32(0), 32)


@pytest.mark.full
@pytest.mark.emulator
def test_reductions(arch):
    """Sums and maxima over every power of two of lanes, in the second wave of a workgroup as in the first."""
    wave = arch.wave
    widths = [2**i for i in range(1, 7) if 2**i <= wave]
    x = np.random.default_rng(6).integers(-50, 50, (2, wave)).astype(np.float32)  # sums are exact
    sums, tops = (np.zeros((len(widths), 2, wave), np.float32) for _ in range(2))

    def body(b, _group, lane, w):
        for i, width in enumerate(widths):
            T.buffer_store(b.S, device.wave_sum(arch, b.X[w, lane], width), [i, w, lane])
            T.buffer_store(b.M, device.wave_max(arch, b.X[w, lane], width), [i, w, lane])

    shape = sums.shape
    func = kernel({"X": (x.shape, "float32"), "S": (shape, "float32"), "M": (shape, "float32")}, (1,), (wave, 2), body)
    emulate(compile_hsaco({"reduce": func}, arch), "reduce", {"X": x, "S": sums, "M": tops})
    for i, width in enumerate(widths):
        groups = x.reshape(2, -1, width)
        assert np.array_equal(sums[i], np.repeat(groups.sum(2), width, axis=1))
        assert np.array_equal(tops[i], np.repeat(groups.max(2), width, axis=1))


def test_reductions_use_the_vector_unit():
    """On RDNA a wave's sum takes no instruction of the LDS unit."""

    def body(b, _group, lane):
        T.buffer_store(b.X, device.wave_sum(ARCHS["gfx1100"], b.X[lane]), [lane])

    module = compile_hsaco({"sum": kernel({"X": ((32,), "float32")}, (1,), (32,), body)}, ARCHS["gfx1100"])
    counts = hsaco.instructions(module.assembly, "sum_kernel").by_mnemonic
    assert not [name for name in counts if name.startswith("ds_")]
    assert counts["v_add_f32_dpp"] == 4 and counts["v_permlanex16_b32"] == 1


def test_the_code_generator_sees_no_expressions_of_values():
    """Its simplifier would know a value that is used twice by an expression of twice the size. LLVM makes registers of
    them again."""
    links = 12

    def body(b, _group, thread):
        x = T.Bind(b.X[thread])
        for i in range(links):
            x = device.fma(x, x, T.float32(i))
        T.buffer_store(b.Y, x, [T.Bind(31 - thread)])

    arch = ARCHS["gfx1100"]
    func = kernel({name: ((32,), "float32") for name in "XY"}, (1,), (32,), body)
    bound = []
    _, lowered = lower("chain", func, arch, rocm_target(arch))
    module = values_in_memory()(tvm.IRModule(lowered))
    walk(module["chain_kernel"].body, tirx.Bind, lambda bind: bound.append(str(bind.var.ty)))
    assert set(bound) == {"int32"}
    compiled = compile_hsaco({"chain": func}, arch)
    assert (
        compiled.assembly.count("v_fma") == links and hsaco.parse(compiled.hsaco).kernels["chain_kernel"].scratch == 0
    )
