"""Modules that require reconvergence of lanes after branches (runtime/devices/vulkan/reconvergence.py)."""

import pytest
from spirv_kernels import THREADS, compiled, kernel, validate
from tvm.tirx.script import builder as T

from mlc_amd.compiler.codegen.spirv_reader import instructions, read
from mlc_amd.runtime.devices.vulkan.reconvergence import MODES, reconverging
from mlc_amd.schedules.gpu.base.device import wave_sum
from mlc_amd.schedules.gpu.base.profiles import resolve

VANGOGH = resolve("vangogh")
MAXIMAL, UNIFORM = MODES
EXECUTION_MODE, ENTRY_POINT = 16, 15


@pytest.fixture(scope="module")
def module() -> bytes:
    def body(b, _group, i):
        T.buffer_store(b.y, wave_sum(VANGOGH, T.Bind(b.x[i])), [i])

    buffers = {"x": ((THREADS,), "int32"), "y": ((THREADS,), "int32")}
    return compiled(kernel(buffers, (1,), (THREADS,), body), VANGOGH).binary


@pytest.mark.parametrize(
    ("features", "feature"),
    [({UNIFORM, "shaderInt64"}, UNIFORM), ({MAXIMAL}, MAXIMAL), ({UNIFORM, MAXIMAL}, MAXIMAL)],
)
def test_the_best_mode_is_asked_for(module, features, feature):
    extension, mode = MODES[feature]
    made = reconverging(module, features)
    before, after = read(module), read(made)
    assert set(after.extensions) == {*before.extensions, extension} and after.block == before.block
    found, known = instructions(made), instructions(module)
    (entry,) = (words[1] for opcode, words in found if opcode == ENTRY_POINT)
    added = [one for one in found if one not in known]
    assert (EXECUTION_MODE, (entry, mode)) in added and len(added) == 2
    assert [one for one in found if one not in added] == known
    if feature == UNIFORM:  # older versions of SPIRV-Tools do not know the other one
        validate(made)


@pytest.mark.parametrize("features", [set(), {"shaderInt64", "cooperativeMatrix"}])
def test_others_stay_as_they_are(module, features):
    assert reconverging(module, features) is module


@pytest.mark.parametrize("end", [0, 3, 20, 21, 40, 50])
def test_what_is_no_module_is_left_to_the_driver(module, end):
    assert reconverging(module[:end], {UNIFORM}) == module[:end]
