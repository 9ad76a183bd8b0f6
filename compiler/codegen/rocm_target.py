"""The rocm target: layouts, kernels from schedules/gpu, and one code object for each arch of the artifact.

All archs of an artifact share its plan and its weights, so they must take activations in the same layouts: RDNA3 and RDNA4 go together,
CDNA's go together, GPUs without matrix units go together.
"""

import gzip
import math
from dataclasses import asdict
from pathlib import Path

import tvm

from mlc_amd.compiler.codegen.rocm import compile_hsaco
from mlc_amd.compiler.codegen.target import Target
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.host import kfd_gpus
from mlc_amd.schedules.gpu import arch as archs
from mlc_amd.schedules.gpu.attention import attention
from mlc_amd.schedules.gpu.attention_decode import attention_decode, scratch_shapes
from mlc_amd.schedules.gpu.embed import embed
from mlc_amd.schedules.gpu.gate_up_gemm import gate_up_swiglu as gate_up_gemm
from mlc_amd.schedules.gpu.gemm import linear as gemm
from mlc_amd.schedules.gpu.gemv import gate_up_swiglu as gate_up_gemv
from mlc_amd.schedules.gpu.gemv import linear as gemv
from mlc_amd.schedules.gpu.norm import quantize, rms_norm
from mlc_amd.schedules.gpu.planes import planes
from mlc_amd.schedules.gpu.rope_kv_write import Rope, rope_kv_write


class RocmTarget(Target):
    """`arch`: names of schedules/gpu/arch.py, separated by commas, or "auto" for this machine's GPU. UserError if one is unknown, or
    they cannot share an artifact."""

    kind = "rocm"
    query_dtype = "float16"
    layout = "rows"
    fuses_rope = True
    planes = staticmethod(planes)

    def __init__(self, arch: str):
        super().__init__()
        names = _here() if arch in ("native", "auto") else arch.split(",")
        self.archs = list(dict.fromkeys(archs.resolve(name) for name in names))
        self.arch = self.archs[0]  # whose kernels are being made
        self._makers = {}
        for other in self.archs[1:]:
            if bool(other.matrix) != bool(self.arch.matrix):
                raise UserError(f"{self.arch.name} and {other.name} need different layouts; compile an artifact for each")

    def prefill_sizes(self, ctx: int) -> list[int]:
        # kernels without dot products take LLVM several times as long: one size fewer
        sizes = (16, 64, 512) if all(arch.dot for arch in self.archs) else (64, 512)
        return [m for m in sizes if m <= max(ctx, 64)]

    def act_layout(self, m: int, kind: str) -> str:
        if m > 1 and self.arch.matrix:
            return "half"
        return "rows" if kind == "int8" else ""

    def kv_types(self, config, ctx: int) -> dict[str, tuple[tuple[int, ...], str]]:
        """Units of 16 bytes: 8 elements of 32 keys side by side, 8 keys of a value's column side by side."""
        heads, d = config.kv_heads, config.head_dim
        shapes = {"k": (heads, ctx // 32, d // 8, 32, 8), "v": (heads, ctx // 8, d, 8)}
        return {f"{which}.{layer}": (shapes[which], "float16") for layer in range(config.layers) for which in "kv"}

    def attention_workspace(self, config, ctx: int) -> dict[str, tuple[tuple[int, ...], str]]:
        """What the splits of decode attention join through; as large as the arch that splits most wants it."""
        needs = [scratch_shapes(config.heads, config.kv_heads, config.head_dim, ctx, arch) for arch in self.archs]
        return {f"attention.{name.lower()}": max((need[name] for need in needs), key=lambda of: math.prod(of[0])) for name in needs[0]}

    @property
    def description(self) -> dict:
        return {"kind": "rocm", "arch": ",".join(arch.name for arch in self.archs), "archs": [arch.name for arch in self.archs]}

    # ---- kernels

    def _call(self, bb, call, label, make, **options):
        """Remembers how each kernel is made: the other archs' come later."""
        result = super()._call(bb, call, label, make, **options)
        for name in self.kernels.keys() - self._makers.keys():
            self._makers[name] = make
        return result

    def make_embed(self, fmt, vocab, k, m, name):
        return embed(fmt, vocab, k, m, self.arch, name)

    def make_rms_norm(self, k, m, eps, act, row, name):
        return rms_norm(k, m, eps, act, row, self.arch, name)

    def make_quantize(self, k, m, act, name):
        return quantize(k, m, act, self.arch, name)

    def make_linear(self, segments, k, m, act, biases, residual, name):
        return (gemv if m == 1 else gemm)(segments, k, m, act, biases, residual, self.arch, name)

    def make_gate_up_swiglu(self, gate, up, n, k, m, act_in, act_out, name):
        return (gate_up_gemv if m == 1 else gate_up_gemm)(gate, up, n, k, m, act_in, act_out, self.arch, name)

    def make_rope_kv_write(self, heads, kv_heads, d, ctx, m, neox, rotary, eps, name):
        return rope_kv_write(heads, kv_heads, d, ctx, m, neox, rotary, eps, self.arch, name)

    def make_attention(self, heads, kv_heads, d, ctx, m, act, name):
        return attention(heads, kv_heads, d, ctx, m, act, self.arch, name)

    def make_rope_attention(self, heads, kv_heads, d, ctx, neox, rotary, eps, act, name):
        return attention_decode(heads, kv_heads, d, ctx, act, self.arch, name, Rope(neox, rotary, eps))

    # ---- compilation

    def compile_kernels(self, mod: tvm.IRModule, directory: Path, progress, workers: int) -> dict:
        """{"libraries": {arch: code object}, "launches": {arch: {kernel: {"scratch": [bytes], "steps": [launch]}}}}; see dist/README.md."""
        names = sorted(gv.name_hint for gv, func in mod.functions.items() if isinstance(func, tvm.tirx.PrimFunc))
        if unfused := set(names) - self.kernels.keys():
            raise UserError(f"this model needs {', '.join(sorted(unfused))} outside of fused kernels; use --target cpu")
        libraries, launches, steps = {}, {}, []

        def step(name: str) -> None:  # one a kernel, and one for the arch's code object
            steps.append(name)
            progress("kernels", len(steps), (len(names) + 1) * len(self.archs))

        for arch in self.archs:
            self.arch = arch
            kernels = {name: self.kernels[name] if arch is self.archs[0] else self._makers[name](name) for name in names}
            module = compile_hsaco(kernels, arch, lowered=step)
            libraries[arch.name] = f"kernels-{arch.name}.hsaco"
            (directory / libraries[arch.name]).write_bytes(module.hsaco)
            # for `inspect`: most machines have no disassembler for these
            (directory / f"kernels-{arch.name}.s.gz").write_bytes(gzip.compress(module.assembly.encode(), mtime=0))
            launches[arch.name] = {
                name: {"scratch": list(function.scratch), "steps": [asdict(step) for step in function.launches]}
                for name, function in module.functions.items()
            }
            step("")
        return {"libraries": libraries, "launches": launches}


def _here() -> list[str]:
    """The arch of this machine's GPU. UserError without one."""
    found = kfd_gpus()
    if not found:
        raise UserError("this machine shows no AMD GPU to compile for; name one with --arch, as gfx1100 or 7900xtx")
    return [found[0]["arch"]]
