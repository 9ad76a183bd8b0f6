"""The CPUs that --arch may name: LLVM compiles for each that is accepted, and the others are refused before."""

import subprocess
import sys

import pytest
import tvm
from tvm.target import codegen

from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.cpu.base.arch import resolve

NAMES = sorted(map(str, codegen.llvm_get_cpu_archlist(tvm.target.Target({"kind": "llvm"}))))
# without SSE3, with AVX512 of other kinds than kernels know, the newest, the levels
SAMPLE = ("generic", "k8", "bonnell", "knl", "cannonlake", "diamondrapids", "novalake", "znver5", "x86-64-v4")
# LLVM ends the process where it does not know what to do, so this is one of its own. It says whom it compiles for.
PROGRAM = """
import sys
from mlc_amd.compiler.codegen.cpu import build_module
from mlc_amd.schedules.cpu.base.arch import resolve
from mlc_amd.schedules.cpu.linear.linear import linear
from mlc_amd.schedules.operators import Linear

for name in sys.argv[1:]:
    print(name, flush=True)
    arch = resolve(name)
    op = Linear(segments=(("q4_0", 32),), k=64, m=1, layout="", biases=(False,), residual=False)
    build_module({"kernel": linear(op, arch, "kernel")}, arch.target).inspect_source("asm")
"""


def accepted() -> list[str]:
    found = []
    for name in NAMES:
        try:
            found.append(resolve(name).name)
        except UserError as error:
            assert f"CPU arch '{name}' has 32 bits only" in str(error)
    return found


def test_cpus_of_32_bits_are_refused():
    found = set(accepted())
    assert found.isdisjoint({"i686", "pentium4", "lakemont"}) and found.issuperset(SAMPLE)


@pytest.mark.parametrize("names", [SAMPLE, pytest.param(None, marks=pytest.mark.full)], ids=["sample", "all"])
def test_llvm_compiles_for_every_cpu_that_is_accepted(names):
    wanted = list(names or accepted())
    done = subprocess.run([sys.executable, "-c", PROGRAM, *wanted], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()) == (0, wanted), done.stderr
