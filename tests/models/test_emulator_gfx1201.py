"""gfx1201 (RDNA4) in the ISA emulator."""

from typing import ClassVar

import pytest
from emulator_suite import OnArch, SameOnAll


class TestGfx1201(OnArch):
    arch = "gfx1201"
    today: ClassVar = {"q4_0": 35.1, "q4_k": 39.2, "q6_k": 56.2, "q8_0": 22.5}
    eight: ClassVar = {"q4_0": 71.0, "q4_k": 83.6, "q6_k": 105.5, "q8_0": 78.2}


@pytest.mark.full
class TestMoreOnGfx1201(SameOnAll):
    arch = "gfx1201"
