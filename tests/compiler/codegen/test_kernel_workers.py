"""Kernels for GPUs, compiled in several processes: the same code as in one."""

from dataclasses import replace

import pytest
from workloads import built, operator

from mlc_amd.compiler.codegen import hsaco, kernel_workers
from mlc_amd.compiler.codegen.kernel_workers import Kernel, Workers, result
from mlc_amd.compiler.codegen.rocm import compile_hsaco
from mlc_amd.compiler.codegen.rocm_target import RocmTarget
from mlc_amd.compiler.codegen.spirv import compile_spirv
from mlc_amd.compiler.codegen.target import make_target
from mlc_amd.compiler.codegen.vulkan_target import VulkanTarget
from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.gpu.base.arch import resolve


@pytest.fixture(autouse=True)
def several_processes(monkeypatch):
    monkeypatch.setattr(kernel_workers, "MOST", 2)
    monkeypatch.setattr(RocmTarget, "compiler", staticmethod(compile_hsaco))
    monkeypatch.setattr(VulkanTarget, "compiler", staticmethod(compile_spirv))


def quantizers(sizes):
    """{name: operator}"""
    return {f"quantize_{k}": operator("quantize", {"m": 8, "k": k, "layout": "rows"}) for k in sizes}


def compiled(kind, arch, operators, folder, workers, done=lambda name: None):
    """(bytes of the file, launches) of an artifact's kernels."""
    folder.mkdir()
    target = make_target(kind, arch)
    (arch,) = target.archs
    target.workloads |= operators
    kernels = {name: built(op, arch, name) for name, op in operators.items()}
    library, launches = target.compile_arch(arch, kernels, folder, done, workers)
    return (folder / library).read_bytes(), launches


@pytest.fixture
def others_only(monkeypatch):
    """What another process may compile is compiled there, also if this one is idle."""
    monkeypatch.setattr("concurrent.futures.Future.cancel", lambda future: False)


@pytest.mark.parametrize("kind, arch", [("rocm", "gfx1100"), ("vulkan", "gfx1151")])
def test_processes_make_the_same_code(kind, arch, tmp_path, others_only):
    """gfx1151 is a profile with numbers of its own, which its name does not tell."""
    operators, done = quantizers((256, 512, 1024)), []
    alone, launches = compiled(kind, arch, operators, tmp_path / "alone", Workers(1))
    with Workers(2) as workers:
        found = compiled(kind, arch, operators, tmp_path / "together", workers, done.append)
    if kind == "rocm":  # in a process that has compiled much LLVM may choose other registers
        assert (
            hsaco.parse(found[0]).kernels.keys() == hsaco.parse(alone).kernels.keys()
            and found[1].keys() == launches.keys()
        )
    else:
        assert found == (alone, launches)
    assert sorted(done) == sorted(operators)
    codes = {name: kernel["steps"][0]["code"] for name, kernel in launches.items()}
    assert len({tuple(code) for code in codes.values()}) == 3 and sum(size for _, size in codes.values()) == len(alone)
    if kind == "rocm":
        parsed = [hsaco.parse(alone[begin : begin + size]).kernels for begin, size in codes.values()]
        assert [list(kernels) for kernels in parsed] == [[f"{name}_kernel"] for name in operators]
        assert hsaco.parse(alone).kernels == {name: kernel for kernels in parsed for name, kernel in kernels.items()}


def test_this_process_compiles_what_others_have_not_begun(tmp_path, monkeypatch):
    here = []
    target = make_target("rocm", "gfx1100")
    monkeypatch.setattr(type(target), "compiler", staticmethod(lambda kernels, arch: here.extend(kernels)))
    monkeypatch.setattr(Workers, "compile", lambda *_: kernel_workers.Future())
    operators = quantizers((256, 512))
    target.workloads |= operators
    groups = [[name] for name in operators]
    assert list(target.modules(target.archs[0], groups, operators, lambda name: None, Workers(2))) == [None, None]
    assert here == ["quantize_512", "quantize_256"]


def test_errors_of_processes(tmp_path, monkeypatch, others_only):
    monkeypatch.setattr(kernel_workers, "MODULE", "mlc_amd.no_such_module")
    with Workers(2) as workers, pytest.raises(RuntimeError, match=r"compiling kernels: .*no_such_module"):
        compiled("rocm", "gfx1100", quantizers((256,)), tmp_path / "died", workers)


def test_what_a_kernel_is_refused_for():
    """Also in another process."""
    impossible = replace(quantizers((256,))["quantize_256"], k=100)
    with Workers(2) as workers, pytest.raises(UserError, match="32 columns, not 100"):
        result(workers.compile(compile_hsaco, resolve("gfx1100"), [Kernel("quantize", impossible, None)]))
