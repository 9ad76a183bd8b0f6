"""The plans of GPU kernels. The fields of a plan are described by its dataclass, in the kernel's module."""

from mlc_amd.schedules import operators
from mlc_amd.schedules.gpu import registry
from mlc_amd.schedules.gpu.attention import rope_kv_write
from mlc_amd.schedules.gpu.attention.spaces import WAVES, attention, decode
from mlc_amd.schedules.space import Kernel, Space


@registry.plans(operators.RopeKvWrite)
def _rope_kv_write(op, arch) -> Space:
    heads = rope_kv_write.wave_heads(op.layer, op.rope)

    def kernel(plan) -> Kernel:
        waves = min(plan.waves, arch.threads // arch.wave)
        return Kernel(waves, -(-heads // waves) * op.m, waves * arch.wave, op.layer.d * 4 / arch.wave)

    return Space(rope_kv_write.Plan, {"waves": WAVES}, rope_kv_write.PLAN, kernel)


registry.plans(operators.CausalAttention)(attention)
registry.plans(operators.RopeAttention)(decode)
