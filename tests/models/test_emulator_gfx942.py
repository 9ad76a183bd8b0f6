"""gfx942 (CDNA3) in the ISA emulator."""

import subprocess
from typing import ClassVar

import numpy as np
import pytest
from emulator_suite import OnArch, SameOnAll

from mlc_amd.compiler.codegen.rocm import find_linker, link


class TestGfx942(OnArch):
    arch = "gfx942"
    today: ClassVar = {"q4_0": 21.9, "q4_k": 25.8, "q6_k": 33.8, "q8_0": 17.2}
    eight: ClassVar = {"q4_0": 47.8, "q4_k": 55.1, "q6_k": 65.5, "q8_0": 51.8}


@pytest.mark.full
class TestMoreOnGfx942(SameOnAll):
    arch = "gfx942"


# Each lane writes two accumulation registers to LDS, where the vector registers of these numbers hold something else,
# and returns what lies there.
WRITE = """
.amdgcn_target "amdgcn-amd-amdhsa--gfx942"
.globl write
.p2align 8
.type write,@function
write:
  s_load_dwordx2 s[0:1], s[0:1], 0x0
  v_lshlrev_b32 v1, 3, v0
  v_accvgpr_write_b32 a4, v0
  v_accvgpr_write_b32 a5, v1
  v_mov_b32 v4, -1
  v_mov_b32 v5, -1
  s_waitcnt lgkmcnt(0)
  ds_write_b64 v1, a[4:5]
  s_waitcnt lgkmcnt(0)
  ds_read_b64 v[2:3], v1
  s_waitcnt lgkmcnt(0)
  global_store_dwordx2 v1, v[2:3], s[0:1]
  s_endpgm
.rodata
.p2align 6
.amdhsa_kernel write
  .amdhsa_group_segment_fixed_size 512
  .amdhsa_user_sgpr_kernarg_segment_ptr 1
  .amdhsa_next_free_vgpr 16
  .amdhsa_next_free_sgpr 16
  .amdhsa_accum_offset 8
.end_amdhsa_kernel
.amdgpu_metadata
amdhsa.version: [1, 2]
amdhsa.kernels:
  - .name: write
    .symbol: write.kd
    .kernarg_segment_size: 8
    .kernarg_segment_align: 8
    .group_segment_fixed_size: 512
    .private_segment_fixed_size: 0
    .wavefront_size: 64
    .sgpr_count: 16
    .vgpr_count: 16
    .max_flat_workgroup_size: 64
    .args: [{.name: out, .size: 8, .offset: 0, .value_kind: global_buffer, .address_space: global}]
.end_amdgpu_metadata
"""


@pytest.mark.emulator
def test_lds_writes_of_accumulation_registers(emulator, linker, tmp_path):
    source, made = tmp_path / "write.s", tmp_path / "write.o"
    source.write_text(WRITE)
    command = ["clang", "-target", "amdgcn-amd-amdhsa", "-mcpu=gfx942", "-c", str(source), "-o", str(made)]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("clang does not know AMD GPUs")
    out = np.zeros((64, 2), np.uint32)
    code = emulator.CodeObject(link(made.read_bytes(), find_linker()))
    emulator.launch(code, "write", (1, 1, 1), (64, 1, 1), [out])
    assert out.tolist() == [[lane, 8 * lane] for lane in range(64)]
