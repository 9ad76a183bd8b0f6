"""gfx942 (CDNA3) in the ISA emulator."""

from emulator_suite import OnArch


class TestGfx942(OnArch):
    arch, spec = "gfx942", "tiny-qwen3:q4_k"
    today = (21.9, 25.8, 33.8, 17.2)
    eight = (39.8, 47.4, 77.6, 35.3)
