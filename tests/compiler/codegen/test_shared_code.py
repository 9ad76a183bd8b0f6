"""Kernels that differ only in how many workgroups they launch share one code, and no others do."""

from dataclasses import replace

import pytest
from tvm.tirx.script import builder as T
from vulkan_harness import PROFILES
from workloads import built, operator

from mlc_amd.compiler.codegen.kernel_workers import ALONE
from mlc_amd.compiler.codegen.lower import lower
from mlc_amd.compiler.codegen.rocm import rocm_target
from mlc_amd.compiler.codegen.shared_code import relaunched, representatives
from mlc_amd.compiler.codegen.vulkan_target import VulkanTarget
from mlc_amd.schedules.gpu.base.arch import resolve
from mlc_amd.schedules.gpu.base.device import launch
from mlc_amd.schedules.gpu.base.registers import put
from mlc_amd.schedules.gpu.base.step import kernel


def built_as(name, op, arch, **args):
    return built(operator(op, args), arch, name)


def samples(arch, rows, vocab=5000):
    return {f"sample_m{m}": built_as(f"sample_m{m}", "sample", arch, m=m, vocab=vocab, columns=5008) for m in rows}


def test_rows_of_a_step_share_the_code_of_the_most():
    kernels = samples(resolve("gfx1100"), (8, 64, 1))
    assert representatives(kernels) == dict.fromkeys(kernels, "sample_m64")


def test_launches_are_those_of_the_kernel_itself():
    arch = resolve("gfx1100")
    kernels = samples(arch, (8, 64))
    few, most = (lower(name, made, arch, rocm_target(arch))[0] for name, made in kernels.items())
    shared = relaunched(most, kernels["sample_m8"])
    own = [replace(launch, symbol=other.symbol) for launch, other in zip(few.launches, most.launches, strict=True)]
    assert list(shared.launches) == own != list(most.launches)


@pytest.mark.parametrize("other", [{"vocab": 5001}, {"name": "wave"}])
def test_other_code_is_its_own(other):
    if "name" in other:  # the same operator on an arch with waves of another size
        kernels = samples(resolve("gfx1100"), (8,)) | {"other": samples(resolve("gfx942"), (64,))["sample_m64"]}
    else:
        arch = resolve("gfx1100")
        kernels = samples(arch, (8,)) | {"other": samples(arch, (64,), **other)["sample_m64"]}
    assert representatives(kernels) == {name: name for name in kernels}


def placed(grid):
    """A kernel of one thread a workgroup, each of which writes its number."""
    with kernel("placed") as ir:
        out = T.arg("out", T.buffer((64,), "int32"))
        with launch(grid, (1,)) as (column, row, _):
            put(out, column + row, row * 8 + column)
    return ir.get()


def test_code_for_fewer_workgroups_is_not_launched_for_more():
    """It may rely on how large a workgroup's number is."""
    found = representatives({"wide": placed((8, 2)), "high": placed((2, 8)), "few": placed((1, 2))})
    assert found == {"wide": "wide", "high": "high", "few": "wide"}


def test_an_artifact_holds_the_code_once(tmp_path):
    target, steps = VulkanTarget("lavapipe"), []
    kernels = samples(PROFILES["lavapipe"], (1, 8, 64))
    library, launches = target.compile_arch(PROFILES["lavapipe"], kernels, tmp_path, steps.append, ALONE)
    symbols = {name: [step["symbol"] for step in found["steps"]] for name, found in launches.items()}
    assert symbols == dict.fromkeys(kernels, symbols["sample_m64"]) and sorted(steps) == sorted(kernels)
    alone = tmp_path / "alone"
    alone.mkdir()
    target.compile_arch(PROFILES["lavapipe"], samples(PROFILES["lavapipe"], (64,)), alone)
    assert (alone / library).read_bytes() == (tmp_path / library).read_bytes()
