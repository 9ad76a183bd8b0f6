"""gfx1100 (RDNA3) in the ISA emulator, and the gate of tuning that asks it."""

import json
import shutil

import pytest
from emulator_suite import OnArch

from mlc_amd.compiler.tuning.static import Static
from mlc_amd.runtime.measure.candidate import read
from mlc_amd.runtime.measure.child import Child
from mlc_amd.schedules.gpu.gemv import Plan
from mlc_amd.schedules.tuning.workload import Workload
from mlc_amd.tools.dev.emulated_pair import MODULE


class TestGfx1100(OnArch):
    arch, spec = "gfx1100", "tiny:q4_0"
    today = (34.7, 39.4, 56.5, 23.7)


@pytest.mark.usefixtures("emulator")
def test_the_gate_of_static_tuning(tmp_path):
    """The same plan for a smaller matrix passes; a kernel that leaves most rows out does not."""
    args = {"segments": [["q4_0", 1024]], "k": 256, "m": 1, "act": "rows", "biases": [True], "residual": False}
    workload = Workload("linear", args)
    with Static("rocm", "gfx1100", 1, emulator=MODULE) as static:
        found = static.gate(workload, Plan(rows=2, waves=1, lanes=4, unroll=1))
        assert (found.checked, found.passed) == ("emulator (reduced shape)", True), found
        assert 0 <= found.deviation < 1
        [(right, error)] = static.builder.build([(workload, None)])
        assert error is None
        wrong = tmp_path / "wrong"
        shutil.copytree(right, wrong)
        step = read(wrong).facts["steps"][0] | {"grid": [1, 1, 1]}
        (wrong / "candidate.json").write_text(json.dumps(read(wrong).facts | {"steps": [step]}))
        child = Child(MODULE)
        try:
            child.send({"compare": [str(right), str(wrong)]})
            assert "Y0 is not written everywhere" in "; ".join(child.receive(120)["wrong"])
        finally:
            child.close()
