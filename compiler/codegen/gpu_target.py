"""What the targets on GPUs share: layouts of weights, activations and caches, and the kernels of schedules/gpu.

`GpuTarget` leaves to its subclasses which archs there are and what code the kernels become. All archs of an artifact
share its plan and its weights, so they must take activations in the same layouts.
"""

from abc import abstractmethod
from dataclasses import asdict
from pathlib import Path

import tvm

from mlc_amd.compiler import nodes
from mlc_amd.compiler.codegen.target import Target
from mlc_amd.compiler.models.config import AttentionConfig
from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.attention import Attention, Rope
from mlc_amd.schedules.gpu.attention import attention
from mlc_amd.schedules.gpu.attention_decode import attention_decode
from mlc_amd.schedules.gpu.attention_join import scratch_shapes
from mlc_amd.schedules.gpu.cache import cache_types
from mlc_amd.schedules.gpu.embed import embed
from mlc_amd.schedules.gpu.gate_up_gemm import gate_up_swiglu as gate_up_gemm
from mlc_amd.schedules.gpu.gemm import linear as gemm
from mlc_amd.schedules.gpu.gemv import gate_up_swiglu as gate_up_gemv
from mlc_amd.schedules.gpu.gemv import linear as gemv
from mlc_amd.schedules.gpu.norm import quantize, rms_norm
from mlc_amd.schedules.gpu.planes import planes
from mlc_amd.schedules.gpu.rope_kv_write import rope_kv_write


class GpuTarget(Target):
    """`archs`: what `arch` of the kernel builders may be, the first one's kernels are made first. UserError if they
    cannot share an artifact. Subclasses have `matrix_layout`, that of activations for matrix units, and
    `compile_for`."""

    query_dtype = "float16"
    layout = "rows"
    fuses_rope = True
    planes = staticmethod(planes)
    matrix_layout: str

    def __init__(self, archs: list):
        super().__init__()
        self._archs = list(dict.fromkeys(archs))
        self.arch = self.archs[0]  # whose kernels are being made
        for other in self.archs[1:]:
            if bool(other.matrix) != bool(self.arch.matrix):
                raise UserError(
                    f"{self.arch.name} and {other.name} need different layouts; compile an artifact for each"
                )

    @property
    def archs(self) -> list:
        return self._archs

    def prefill_sizes(self, ctx: int) -> list[int]:
        # kernels without dot products take LLVM several times as long: one size fewer
        sizes = (16, 64, 512) if all(arch.dot for arch in self.archs) else (64, 512)
        return [m for m in sizes if m <= max(ctx, 64)]

    def act_layout(self, m: int, kind: str) -> str:
        if m > 1 and self.arch.matrix:
            return self.matrix_layout
        return "rows" if kind == "int8" else ""

    def cache_types(self, attention: AttentionConfig, ctx: int) -> dict[str, tuple[tuple[int, ...], str]]:
        return cache_types(attention.kv_heads, ctx, attention.head_dim)

    def attention_workspace(self, attention: AttentionConfig, ctx: int) -> dict[str, tuple[tuple[int, ...], str]]:
        """What the splits of decode attention join through; layers of the same shape share it."""
        a = attention
        shapes = scratch_shapes(a.heads, a.kv_heads, a.head_dim)
        return {f"attention.{a.heads}x{a.kv_heads}x{a.head_dim}.{name.lower()}": of for name, of in shapes.items()}

    @property
    def description(self) -> dict:
        names = [arch.name for arch in self.archs]
        bandwidth = {arch.name: arch.bandwidth for arch in self.archs}
        return {"kind": self.kind, "arch": ",".join(names), "archs": names, "bandwidth": bandwidth}

    # ---- kernels

    def make_embed(self, fmt, vocab, k, m, name, plan=None, scale=1.0):
        return embed(fmt, vocab, k, m, self.arch, name, plan, scale)

    def make_rms_norm(self, k, m, eps, act, row, name, plan=None):
        return rms_norm(k, m, eps, act, row, self.arch, name, plan)

    def make_quantize(self, k, m, act, name, plan=None):
        return quantize(k, m, act, self.arch, name, plan)

    def make_linear(self, segments, k, m, act, biases, residual, name, plan=None):
        return (gemv if m == 1 else gemm)(segments, k, m, act, biases, residual, self.arch, name, plan)

    def make_gate_up_swiglu(self, gate, up, n, k, m, act_in, act_out, name, plan=None, act_fn="silu"):
        make = gate_up_gemv if m == 1 else gate_up_gemm
        return make(gate, up, n, k, m, act_in, act_out, self.arch, name, plan, act_fn)

    def make_rope_kv_write(
        self, heads, kv_heads, d, ctx, m, neox, rotary, eps, name, plan=None,
        scale=0.0, window=0, softcap=0.0, sinks=False,
    ):  # fmt: skip
        """Only `scale` of an `Attention`'s attributes makes a difference."""
        layer = Attention(heads, kv_heads, d, ctx, scale, window, softcap, sinks)
        return rope_kv_write(layer, m, Rope(neox, rotary, eps), self.arch, name, plan)

    def make_attention(
        self, heads, kv_heads, d, ctx, m, act, name, plan=None, scale=0.0, window=0, softcap=0.0, sinks=False
    ):
        """Queries are scaled already: `scale` makes no difference."""
        layer = Attention(heads, kv_heads, d, ctx, scale, window, softcap, sinks)
        return attention(layer, m, act, self.arch, name, plan)

    def make_rope_attention(
        self, heads, kv_heads, d, ctx, neox, rotary, eps, act, name, plan=None,
        scale=0.0, window=0, softcap=0.0, sinks=False,
    ):  # fmt: skip
        layer = Attention(heads, kv_heads, d, ctx, scale, window, softcap, sinks)
        return attention_decode(layer, act, self.arch, name, Rope(neox, rotary, eps), plan)

    # ---- compilation

    def own_kernels(self, arch) -> dict[str, tvm.tirx.PrimFunc]:
        """Kernels that no function of the model calls, but the device."""
        return {}

    @abstractmethod
    def compile_for(
        self, arch, kernels: dict[str, tvm.tirx.PrimFunc], directory: Path, lowered
    ) -> tuple[str, dict, dict]:
        """Compiles one arch's kernels. Returns the file in `directory`, `lower.Function` by kernel, and by symbol what
        a launch's entry in the manifest says besides symbol, grid, block and args."""

    def compile_kernels(self, mod: tvm.IRModule, directory: Path, progress, workers: int) -> dict:
        """{"libraries": {arch: file}, "launches": {arch: {kernel: {"scratch": [bytes], "steps": [launch]}}}}; see
        dist/README.md."""
        names = sorted(gv.name_hint for gv, func in nodes.functions(mod).items() if isinstance(func, tvm.tirx.PrimFunc))
        libraries, launches, steps = {}, {}, []

        def step(name: str) -> None:  # one a kernel, and one for the arch's code
            if name not in own:
                steps.append(name)
            progress("kernels", len(steps), (len(names) + 1) * len(self.archs))

        for arch in self.archs:
            self.arch = arch
            kernels = {name: self.kernel(name) for name in names} | (own := self.own_kernels(arch))
            libraries[arch.name], functions, facts = self.compile_for(arch, kernels, directory, step)
            launches[arch.name] = {
                name: {
                    "scratch": list(function.scratch),
                    "steps": [asdict(launch) | facts.get(launch.symbol, {}) for launch in function.launches],
                }
                for name, function in functions.items()
            }
            step("")
        return {"libraries": libraries, "launches": launches}
