"""An artifact's kernels for rocm: several code objects in a file, made in several processes."""

from dataclasses import replace

import pytest
from workloads import built, operator

from mlc_amd.compiler.codegen import hsaco, hsaco_worker, rocm_target
from mlc_amd.compiler.codegen.rocm_target import RocmTarget
from mlc_amd.runtime.errors import UserError


def quantizers(sizes):
    """{name: operator}"""
    return {f"quantize_{k}": operator("quantize", {"m": 8, "k": k, "layout": "rows"}) for k in sizes}


def compiled(operators, folder, workers):
    """(bytes of the file, launches) of an artifact's kernels."""
    folder.mkdir()
    target = RocmTarget("gfx1100")
    (arch,) = target.archs
    target.workloads |= operators
    kernels = {name: built(op, arch, name) for name, op in operators.items()}
    library, launches = target.compile_arch(arch, kernels, folder, workers=workers)
    return (folder / library).read_bytes(), launches


def test_processes_make_the_same_code(tmp_path, monkeypatch):
    monkeypatch.setattr(rocm_target, "FEW_GROUPS", 1)
    operators = quantizers((256, 512, 1024))
    alone, launches = compiled(operators, tmp_path / "alone", 1)
    assert compiled(operators, tmp_path / "together", 2) == (alone, launches)
    codes = {name: kernel["steps"][0]["code"] for name, kernel in launches.items()}
    assert len({tuple(code) for code in codes.values()}) == 3 and sum(size for _, size in codes.values()) == len(alone)
    parsed = [hsaco.parse(alone[begin : begin + size]).kernels for begin, size in codes.values()]
    assert [list(kernels) for kernels in parsed] == [[f"{name}_kernel"] for name in operators]
    assert hsaco.parse(alone).kernels == {name: kernel for kernels in parsed for name, kernel in kernels.items()}


def test_errors_of_processes(tmp_path, monkeypatch):
    monkeypatch.setattr(rocm_target, "FEW_GROUPS", 1)
    monkeypatch.setattr(hsaco_worker, "MODULE", "mlc_amd.no_such_module")
    with pytest.raises(RuntimeError, match=r"compiling kernels: .*no_such_module"):
        compiled(quantizers((256,)), tmp_path / "died", 2)


def test_what_a_kernel_is_refused_for():
    """Also in another process."""
    impossible = replace(quantizers((256,))["quantize_256"], k=100)
    with hsaco_worker.Workers("gfx1100", 1) as workers, pytest.raises(UserError, match="32 columns, not 100"):
        hsaco_worker.result(workers.compile([hsaco_worker.Kernel("quantize", impossible, None)]))
