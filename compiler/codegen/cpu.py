"""The cpu target: layouts, kernels for the fused operators, and their compilation to a shared library.

One function per operator of compiler/ops.py turns a call into a `call_tir` of a TensorIR kernel from schedules/cpu; calls with the same
attributes and shapes share a kernel. `compile_kernels` builds all of them with LLVM for the arch.
"""

import importlib.util
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import tvm
from tvm import relax

from mlc_amd.compiler import ops
from mlc_amd.compiler.ops import shape_of
from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.cpu import arch as archs
from mlc_amd.schedules.cpu.attention import attention
from mlc_amd.schedules.cpu.embed import embed
from mlc_amd.schedules.cpu.gate_up import gate_up_swiglu
from mlc_amd.schedules.cpu.linear import linear
from mlc_amd.schedules.cpu.norm import quantize, rms_norm
from mlc_amd.schedules.cpu.planes import planes
from mlc_amd.schedules.cpu.rope_kv_write import rope_kv_write

COMPILERS = ("cc", "gcc", "clang")  # any of them links; else the ziglang package's
LIBRARY = "kernels.so"
BATCH = 4  # kernels compiled at a time by one worker


class CpuTarget:
    """What the graph passes and the plan ask of a target, for CPUs. `arch`: a name of schedules/cpu/arch.py; UserError if unknown."""

    kind = "cpu"

    def __init__(self, arch: str = "native"):
        self.arch = archs.resolve(arch)
        self.isa = self.arch.isa
        self.kernels: dict[str, tvm.tirx.PrimFunc] = {}  # name: kernel
        self._names: dict[tuple, str] = {}  # (operator, attributes, shapes): name

    # ---- layouts

    planes = staticmethod(planes)

    def prefill_sizes(self, ctx: int) -> list[int]:
        """Tokens of the prefill functions. Kernels loop over live tokens only: a size costs what is in it, in steps of its tile."""
        return [m for m in (4, 64, 512) if m <= max(ctx, 64)]

    def act_tile(self, m: int) -> int:
        return min(m, self.isa.tokens)

    def kv_types(self, config, ctx: int) -> dict[str, tuple[tuple[int, ...], str]]:
        """Keys: 16 of them side by side for each element; values: as they come (see schedules/cpu/attention_decode.py)."""
        shapes = {"k": (config.kv_heads, ctx // 16, config.head_dim, 16), "v": (config.kv_heads, ctx, config.head_dim)}
        return {f"{which}.{layer}": (shapes[which], "float16") for layer in range(config.layers) for which in "kv"}

    @property
    def description(self) -> dict:
        return {"kind": "cpu", "arch": self.arch.name, "mcpu": self.arch.mcpu, "isa": self.isa.__name__, "flags": list(self.arch.flags)}

    # ---- kernels

    def select_kernels(self, mod: tvm.IRModule) -> tvm.IRModule:
        """Replaces every operator of ours by a call of its kernel; standard operators that no pass fused get TVM's own kernels."""
        makers = {ops.PREFIX + name: getattr(self, "_" + name) for name in ops.OPS}
        return relax.transform.LegalizeOps(makers)(mod)

    def _call(self, bb, call, label: str, build, inplace: dict[int, int] | None = None, args=None):
        """A call of the kernel that `build(name)` makes: inputs (`args` where the kernel wants another order), flattened, then outputs.
        `inplace`: output index to input index."""
        inputs = [item for arg in (args or call.args) for item in _fields(bb, arg)]
        outputs = list(call.ty.fields) if isinstance(call.ty, relax.TupleType) else [call.ty]
        key = (str(call.op.name), str(call.attrs), tuple(str(arg.ty) for arg in call.args))
        if key not in self._names:
            name = label if label not in self.kernels else f"{label}_{len(self.kernels)}"
            self._names[key], self.kernels[name] = name, build(name)
        name = self._names[key]
        gv = bb.add_func(self.kernels[name], name)
        if inplace:
            place = {j: next(i for i, item in enumerate(inputs) if item.same_as(call.args[arg])) for j, arg in inplace.items()}
            flat = [place.get(j, -1) for j in range(len(outputs))]
            return relax.op.call_tir_inplace(gv, inputs, flat, outputs)
        return relax.op.call_tir(gv, inputs, outputs if len(outputs) > 1 else outputs[0])

    def _embed(self, bb, call):
        a, m = call.attrs, shape_of(call.args[1])[0]
        return self._call(bb, call, f"embed_{a['format']}_m{m}", lambda name: embed(a["format"], int(a["vocab"]), int(a["k"]), m, name))

    def _rms_norm(self, bb, call):
        a, (m, k) = call.attrs, shape_of(call.args[1])
        tile, row = int(a["act_tile"]), str(a["row"])
        label = f"rms_norm{'_quantize' if tile else ''}_{k}_m{m}{'_last' if row == 'last' else ''}"
        return self._call(bb, call, label, lambda name: rms_norm(k, m, float(a["eps"]), tile or 1, bool(tile), row, self.isa, name))

    def _quantize(self, bb, call):
        m, k = shape_of(call.args[1])
        return self._call(bb, call, f"quantize_{k}_m{m}", lambda name: quantize(k, m, int(call.attrs["act_tile"]), self.isa, name))

    def _linear(self, bb, call):
        a = call.attrs
        k, m, tile, residual = (int(a[key]) for key in ("k", "m", "act_tile", "residual"))
        segments = [(str(f), int(n)) for f, n in zip(a["formats"], a["n"], strict=True)]
        biases = tuple(bool(int(b)) for b in a["biases"])
        count = len(segments)
        # the operator takes weights, then biases; the kernel wants each bias behind its weight
        state, x, weights, rest = call.args[0], call.args[1], call.args[2 : 2 + count], list(call.args[2 + count :])
        ordered = [value for weight, bias in zip(weights, biases, strict=True) for value in ([weight, rest.pop(0)] if bias else [weight])]
        label = f"linear_{'_'.join(dict.fromkeys(f for f, _ in segments))}_{sum(n for _, n in segments)}x{k}_m{m}"
        # float activations are not laid out in tiles, yet the kernel works on tiles of tokens
        p = tile or self.act_tile(m)
        build = lambda name: linear(segments, k, m, p, biases, bool(residual), self.isa, name)  # noqa: E731
        return self._call(bb, call, label, build, args=[state, x, *ordered, *rest])

    def _gate_up_swiglu(self, bb, call):
        a = call.attrs
        n, k, m = (int(a[key]) for key in ("n", "k", "m"))
        tile, (gate, up) = int(a["act_tile"]), (str(f) for f in a["formats"])
        p = int(a["act_in"]) or self.act_tile(m)
        label = f"gate_up_swiglu_{'_'.join(dict.fromkeys((gate, up)))}_{n}x{k}_m{m}"
        return self._call(bb, call, label, lambda name: gate_up_swiglu(gate, up, n, k, m, p, bool(tile), self.isa, name))

    def _rope_kv_write(self, bb, call):
        a, m = call.attrs, shape_of(call.args[1])[0]
        eps = float(a["eps"]) if int(a["head_norm"]) else None
        heads, kv_heads, d, ctx, rotary = (int(a[key]) for key in ("heads", "kv_heads", "d", "ctx", "rotary"))
        last = len(call.args)
        return self._call(
            bb, call, f"rope_kv_write_m{m}",
            lambda name: rope_kv_write(heads, kv_heads, d, ctx, m, bool(int(a["neox"])), rotary, eps, self.isa, name),
            inplace={1: last - 2, 2: last - 1},
        )  # fmt: skip

    def _attention(self, bb, call):
        a, m, tile = call.attrs, shape_of(call.args[1])[0], int(call.attrs["act_tile"])
        heads, kv_heads, d, ctx = (int(a[key]) for key in ("heads", "kv_heads", "d", "ctx"))
        p = tile or self.act_tile(m)
        return self._call(bb, call, f"attention_m{m}", lambda name: attention(heads, kv_heads, d, ctx, m, p, bool(tile), self.isa, name))

    # ---- compilation

    def compile_kernels(self, mod: tvm.IRModule, directory: Path, progress, workers: int) -> list[str]:
        """Builds the module's kernels into `directory`; returns the file names (one shared library)."""
        kernels = {gv.name_hint: func for gv, func in mod.functions.items() if isinstance(func, tvm.tirx.PrimFunc)}
        names = sorted(kernels)
        batches = [names[i : i + BATCH] for i in range(0, len(names), BATCH)]
        done = []

        def build(i: int) -> str:
            share = {name: kernels[name].with_attr("global_symbol", name) for name in batches[i]}
            path = str(directory / f"kernels-{i}.o")
            tvm.compile(tvm.IRModule(share), target=self.arch.target).mod.write_to_file(path)
            done.extend(batches[i])
            progress("kernels", len(done), len(names))
            return path

        with ThreadPoolExecutor(workers) as pool:
            try:
                objects = list(pool.map(build, range(len(batches))))
            finally:  # after an error or Ctrl-C, what has not begun is not wanted
                pool.shutdown(wait=True, cancel_futures=True)
        link_shared(objects, directory / LIBRARY)
        for path in objects:
            Path(path).unlink()
        return [LIBRARY]


def _fields(bb, arg) -> list:
    """A tuple's fields as variables; anything else as it is."""
    if not isinstance(arg.ty, relax.TupleType):
        return [arg]
    return [bb.emit(relax.TupleGetItem(arg, i)) for i in range(len(arg.ty.fields))]


def link_shared(objects: list[str], output: Path) -> None:
    """Links object files to a shared library with the first C compiler found. UserError without one."""
    compiler = next(([path] for name in COMPILERS if (path := shutil.which(name))), None)
    if compiler is None and importlib.util.find_spec("ziglang"):
        compiler = [sys.executable, "-m", "ziglang", "cc"]
    if compiler is None:
        raise UserError("no C compiler found to link the kernels; install one (Debian: apt install gcc; anywhere: pip install ziglang)")
    result = subprocess.run([*compiler, "-shared", "-o", str(output), *objects], capture_output=True, text=True)
    if result.returncode:
        raise UserError(f"linking the kernels with {compiler[0]} failed: {result.stderr.strip().splitlines()[-1:]}")
