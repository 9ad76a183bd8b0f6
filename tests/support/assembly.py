"""What made-up kernels in LLVM's assembly have in common, for tests of the static model."""

from mlc_amd.compiler.tuning import isa_costs
from mlc_amd.schedules.gpu.base import arch as archs

GFX1100 = isa_costs.machine(archs.resolve("gfx1100"))
# The end of a kernel named "kernel": what the compiler says about it.
END = """	s_endpgm
	.section .rodata
	.amdhsa_kernel kernel
		.amdhsa_user_sgpr_count 15
		.amdhsa_system_sgpr_workgroup_id_x 1
		.amdhsa_system_sgpr_workgroup_id_y 0
		.amdhsa_system_sgpr_workgroup_id_z 0
	.end_amdhsa_kernel
"""
