"""gfx942 (CDNA3) in the ISA emulator."""

from typing import ClassVar

import pytest
from emulator_suite import OnArch, SameOnAll


class TestGfx942(OnArch):
    arch = "gfx942"
    today: ClassVar = {"q4_0": 21.9, "q4_k": 25.8, "q6_k": 33.8, "q8_0": 17.2}
    eight: ClassVar = {"q4_0": 40.1, "q4_k": 51.1, "q6_k": 66.4, "q8_0": 27.5}


@pytest.mark.full
class TestMoreOnGfx942(SameOnAll):
    arch = "gfx942"
