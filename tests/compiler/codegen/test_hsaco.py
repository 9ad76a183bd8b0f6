"""Reading code objects: resources, arguments, instruction counts and occupancy, of our own kernels and of a damaged or
foreign file."""

import struct
from collections import Counter
from dataclasses import replace

import pytest
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from mlc_amd.compiler.codegen.hsaco import KernelCode, disassemble, instructions, occupancy, parse
from mlc_amd.compiler.codegen.rocm import compile_hsaco
from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.gpu.base import device
from mlc_amd.schedules.gpu.base.arch import ARCHS


def dots(arch):
    """64 threads each multiply 16 words (loaded as four times four) with words from LDS."""
    with IRBuilder() as ir, T.prim_func(s_tir=True):
        T.func_name("dots")
        T.func_attr({"tirx.noalias": True, "global_symbol": "dots"})
        W, Y = T.arg("W", T.buffer((4, 64, 16), "int32")), T.arg("Y", T.buffer((4, 64), "int32"))
        with device.launch((4,), (64,)) as (group, thread):
            shared = T.alloc_buffer((64,), "int32", scope="shared")
            T.buffer_store(shared, W[group, thread, 0], [thread])
            device.barrier()
            total = T.int32(0)
            for i in range(4):
                four = T.Bind(W[group, thread, T.ramp(i * 4, 1, 4)])
                for j in range(4):
                    total = device.dot4(arch, T.Shuffle([four], [T.int32(j)]), shared[63 - thread], total)
            T.buffer_store(Y, total, [group, thread])
    return ir.get()


@pytest.fixture(scope="module")
def modules():
    return {
        name: compile_hsaco({"dots": dots(ARCHS[name])}, ARCHS[name])
        for name in ("gfx90a", "gfx1030", "gfx1100", "gfx1201")
    }


@pytest.mark.parametrize("name", ["gfx90a", "gfx1030", "gfx1100", "gfx1201"])
def test_kernel(modules, name):
    code = parse(modules[name].hsaco)
    assert code.machine == name
    kernel = code.kernels["dots_kernel"]
    assert (kernel.wave, kernel.threads, kernel.lds) == (ARCHS[name].wave, 256, 256)
    assert (kernel.scratch, kernel.vgpr_spills, kernel.sgpr_spills, kernel.agprs) == (0, 0, 0, 0)
    assert 16 <= kernel.vgprs <= 40 and 4 <= kernel.sgprs <= 32
    assert [(arg.name, arg.kind, arg.offset, arg.size) for arg in kernel.args] == [
        ("W", "global_buffer", 0, 8),
        ("Y", "global_buffer", 8, 8),
    ]
    assert kernel.kernarg == 16
    assert 4 * 16 < kernel.code < 2000


@pytest.mark.parametrize("name", ["gfx90a", "gfx1030", "gfx1100", "gfx1201"])
def test_instructions(modules, name):
    counts = instructions(modules[name].assembly, "dots_kernel")
    assert counts.dot == 16 and counts.matrix == 0
    assert counts.memory["global", "load", 16] == 4
    assert counts.memory["ds", "store", 4] == counts.memory["ds", "load", 4] == counts.memory["global", "store", 4] == 1
    assert counts.total == counts.by_mnemonic.total() == counts.classes.total() > 30
    # four loads of four words, of which one goes to LDS, and the result
    assert (counts.classes["lds"], counts.classes["memory"], counts.classes["matrix"]) == (2, 5, 0)
    assert counts.classes["vector"] >= 16 and counts.classes["waits"] >= 2 and counts.units == ["fma", "dot4"]


CLASSES = """k:
\ts_load_b64 s[0:1], s[4:5], 0x0
\tv_mov_b32_e32 v0, 0
\tv_dual_mul_f32 v1, v2, v3 :: v_dual_dot2acc_f32_f16 v4, v5, v6
\ts_waitcnt lgkmcnt(0)
\ts_delay_alu instid0(VALU_DEP_1)
\tglobal_load_b128 v[0:3], v0, s[0:1]
\tscratch_store_b32 off, v1, off
\tds_load_b128 v[4:7], v0
\tv_wmma_f32_16x16x16_f16 v[8:15], v[0:7], v[0:7], v[8:15]
\tv_wmma_i32_16x16x16_iu8 v[8:15], v[0:3], v[0:3], v[8:15]
\ts_barrier
\ts_cbranch_scc1 .LBB0_1
\ts_endpgm
\ts_code_end
"""


def test_classes_of_instructions():
    counts = instructions(CLASSES, "k")
    expected = {"vector": 2, "matrix": 2, "scalar": 3, "waits": 3, "lds": 1, "memory": 2}
    assert (counts.classes, counts.total, counts.dot, counts.matrix) == (Counter(expected), 13, 1, 2)
    assert counts.units == ["fma", "packed16", "matrix16", "matrix8"]


@pytest.mark.parametrize(
    ("mnemonic", "unit"),
    [
        ("v_mfma_f32_16x16x16f16", "matrix16"),
        ("v_mfma_f32_32x32x8_bf16_1k", "matrix16"),
        ("v_mfma_i32_16x16x32_i8", "matrix8"),
        ("v_wmma_i32_16x16x16_iu8", "matrix8"),
        ("v_dot4c_i32_i8", "dot4"),
        ("v_dot2_f32_f16", "packed16"),
        ("v_pk_fma_f16", "packed16"),
    ],
)
def test_units_that_multiply(mnemonic, unit):
    assert instructions(f"k:\n\t{mnemonic} v0, v1, v2\n\ts_endpgm\n", "k").units == ["fma", unit]


def test_disassembly_agrees_with_the_assembly(modules):
    try:
        listing = disassemble(modules["gfx1030"].hsaco)
    except UserError as error:
        pytest.skip(str(error))
    listed, written = instructions(listing, "dots_kernel"), instructions(modules["gfx1030"].assembly, "dots_kernel")
    assert (listed.total, listed.dot, listed.memory) == (written.total, written.dot, written.memory)
    assert (listed.classes, listed.units) == (written.classes, written.units)


def test_widths_of_memory_instructions():
    names = {
        "global_load_dwordx4": ("global", "load", 16), "global_load_b96": ("global", "load", 12),
        "global_load_ubyte": ("global", "load", 1),
        "global_load_short_d16_hi": ("global", "load", 2), "global_load_d16_hi_b16": ("global", "load", 2),
        "global_load_d16_u8": ("global", "load", 1),
        "ds_read2_b64": ("ds", "load", 16), "ds_read2st64_b32": ("ds", "load", 8), "ds_load_2addr_b32": ("ds", "load",
        8),
        "ds_load_2addr_stride64_b64": ("ds", "load", 16), "ds_write_b128": ("ds", "store", 16),
        "ds_read_u16_d16": ("ds", "load", 2),
        "ds_load_u16_d16_hi": ("ds", "load", 2), "ds_store_b16_d16_hi": ("ds", "store", 2),
        "buffer_store_dword": ("buffer", "store", 4),
        "scratch_load_b128": ("scratch", "load", 16), "flat_store_byte": ("flat", "store", 1),
        "global_store_short": ("global", "store", 2),
    }  # fmt: skip
    for name, place in names.items():
        assert instructions(f"k:\n\t{name} v0, v1\n\ts_endpgm\n", "k").memory == Counter([place]), name
    text = (
        "k:\n\tds_bpermute_b32 v0, v1, v2\n\tv_mfma_f32_16x16x16_f16 a[0:3], v0, v1\n\tv_wmma_f32_16x16x16_f16 v0, v1, "
        "v2\n"
    )
    counts = instructions(text + "other:\n\tv_dot4_i32_iu8 v0\n", "k")
    assert (counts.total, counts.matrix, counts.dot, counts.memory) == (3, 2, 0, Counter())


def test_no_such_kernel(modules):
    with pytest.raises(ValueError, match="no kernel other"):
        instructions(modules["gfx1100"].assembly, "other")


KERNEL = KernelCode("k", 32, 256, 64, 0, 32, 0, 0, 0, 0, 0, 0, ())


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("gfx1100", {}, (16, "waves")),
        ("gfx1100", {"vgprs": 97}, (12, "vgprs")),      # 1536 / 120
        ("gfx1102", {"vgprs": 97}, (9, "vgprs")),       # 1024 / 112
        ("gfx1100", {"vgprs": 256}, (5, "vgprs")),      # 1536 / 264
        ("gfx1100", {"lds": 65536}, (4, "lds")),        # two workgroups of eight waves on four SIMDs
        ("gfx1030", {"vgprs": 128, "wave": 64}, (4, "vgprs")),
        ("gfx1010", {"vgprs": 32}, (20, "waves")),
        ("gfx90a", {"vgprs": 128, "wave": 64}, (4, "vgprs")),
        ("gfx906", {"vgprs": 128, "wave": 64}, (2, "vgprs")),
        ("gfx906", {"vgprs": 24, "wave": 64, "sgprs": 102}, (7, "sgprs")),
        ("gfx942", {"wave": 64, "lds": 32768}, (2, "lds")),
    ],
)  # fmt: skip
def test_occupancy(name, changes, expected):
    assert occupancy(replace(KERNEL, **changes), ARCHS[name]) == expected


def test_occupancy_of_a_workgroup_that_does_not_fit():
    assert occupancy(replace(KERNEL, wave=64, lds=65537), ARCHS["gfx942"]) == (0, "lds")
    assert occupancy(replace(KERNEL, lds=32768), ARCHS["gfx1100"], threads=64) == (2, "lds")


def test_foreign_and_damaged_files(modules):
    hsaco = modules["gfx1100"].hsaco
    for data in (b"", b"\x7fELF\x02" + bytes(100), b"__CLANG_OFFLOAD_BUNDLE__" + hsaco):
        with pytest.raises(UserError, match="not an AMD code object"):
            parse(data)
    with pytest.raises(UserError, match="damaged AMD code object"):
        parse(hsaco[:600])
    no_segments = hsaco[:56] + struct.pack("<H", 0) + hsaco[58:]
    with pytest.raises(UserError, match="no kernel metadata"):
        parse(no_segments)
