"""What the linear kernels of a layer of Llama 3 8B execute on AMD GPUs with matrix units, without such a GPU.

    python -m tests.dev.linear_counts [--archs gfx1100,gfx1201,gfx942] [--formats q4_0,q4_k] [--tokens 512] [--kernels]

One workgroup of each kernel, for a step or a chunk, runs in the instruction set emulator (`gfxemu.py`), on zeros; its
counts are scaled by the number of workgroups. For each GPU and format: millions of wave instructions but for matrix
ones, and of matrix instructions, GB read from and written to LDS, and instructions of both kinds for 1000 weights.
--kernels: also of each kernel, with its plan and what the compiler made of it.
"""

import argparse
import sys
from collections.abc import Iterator
from itertools import product
from math import prod
from typing import NamedTuple

import numpy as np

from mlc_amd.compiler.codegen import hsaco
from mlc_amd.compiler.codegen.rocm import compile_hsaco
from mlc_amd.compiler.work import buffers
from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.gpu import registry
from mlc_amd.schedules.gpu.base.arch import GpuArch, resolve
from mlc_amd.schedules.operators import GateUp, Linear
from mlc_amd.tools.terminal import display
from tests.dev import gfxemu

K, KV, HIDDEN = 4096, 1024, 14336


def operators(fmt: str, layout: str, m: int) -> Iterator[tuple[str, Linear | GateUp]]:
    """The layer's linear operators, and their names."""
    parts = {"qkv": (K, (K, KV, KV)), "output": (K, (K,)), "down": (HIDDEN, (K,))}
    for name, (k, rows) in parts.items():
        segments, none = tuple((fmt, n) for n in rows), (False,) * len(rows)
        yield name, Linear(segments=segments, k=k, m=m, layout=layout, biases=none, residual=name != "qkv")
    yield "gate_up", GateUp(gate=fmt, up=fmt, n=HIDDEN, k=K, m=m, layout_in=layout, layout=layout)


class Counts(NamedTuple):
    """Of all workgroups: instructions that are no matrix instructions and those that are, bytes of LDS."""

    others: float
    matrix: float
    lds: float

    def text(self, weights: int) -> str:
        millions = f"{self.others / 1e6:7.1f} M {self.matrix / 1e6:5.1f} M matrix {self.lds / 1e9:6.2f} GB"
        return f"{millions} {(self.others + self.matrix) * 1000 / weights:6.1f} for 1000 weights"


def kernel_counts(op: Linear | GateUp, arch: GpuArch) -> tuple[Counts, str]:
    """Those of the default kernel; its plan, registers of a lane, spills, waves that a SIMD holds. AssertionError for
    hazards."""
    function = registry.builders[type(op)](op, arch, "k", None)
    module = compile_hsaco({"k": function}, arch)
    called, kernels = module.functions["k"], hsaco.parse(module.hsaco).kernels
    arrays = {name: np.zeros(shape, dtype) for name, shape, dtype in buffers(function)}
    arrays["state"][:2] = 0, op.m  # all tokens live
    (launch,) = called.launches
    run_hsaco = gfxemu.load()
    code, args = run_hsaco.CodeObject(module.hsaco), [arrays[called.params[i]] for i in launch.args]
    result = run_hsaco.launch(code, launch.symbol, launch.grid, launch.block, args, groups={(0, 0, 0)})
    assert not result.hazards, result.hazards
    groups, executed = prod(launch.grid), result.by_mnemonic.items()
    matrix = sum(n for name, n in executed if name.startswith(hsaco.CLASSES["matrix"]))
    accesses = ((hsaco.memory_access(name), n) for name, n in executed)
    lds = sum(n * access[2] * arch.wave for access, n in accesses if access and access[0] == "ds")
    kernel = kernels[launch.symbol]
    waves, limit = hsaco.occupancy(kernel, arch, prod(launch.block))
    spills = kernel.vgpr_spills + kernel.sgpr_spills
    made = f"{kernel.vgprs} registers, {spills} spills, {waves} waves of a SIMD ({limit})"
    counts = Counts((result.total - matrix) * groups, matrix * groups, lds * groups)
    return counts, f"{registry.spaces[type(op)](op, arch).default}: {made}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--archs", default="gfx1100,gfx1201,gfx942")
    parser.add_argument("--formats", default="q4_0,q4_k,q6_k,q8_0,mxfp4")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--kernels", action="store_true")
    options = parser.parse_args()
    try:
        for name, fmt in product(options.archs.split(","), options.formats.split(",")):
            report(resolve(name), fmt, options.tokens, options.kernels)
    except UserError as error:
        display.message(f"error: {error}")
        return 1
    return 0


def report(arch: GpuArch, fmt: str, tokens: int, kernels: bool) -> None:
    if not arch.lane_blocks:
        raise UserError(f"{arch.name} has no matrix units: give --archs others")
    total, weights = Counts(0, 0, 0), 0
    for part, op in operators(fmt, f"lanes:{arch.lane_blocks}" if tokens > 1 else "rows", tokens):
        found, made = kernel_counts(op, arch)
        own = op.k * sum(n for _, n in op.weights)
        total, weights = Counts(*map(sum, zip(total, found, strict=True))), weights + own
        if kernels:
            print(f"    {part:10} {found.text(own)}  {made}", flush=True)
    print(f"{arch.name:8} {fmt:5} {total.text(weights)}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
