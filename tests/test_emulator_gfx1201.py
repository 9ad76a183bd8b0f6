"""gfx1201 (RDNA4) in the ISA emulator."""

from emulator_suite import OnArch


class TestGfx1201(OnArch):
    arch, spec = "gfx1201", "tiny-qwen3:q4_k"
    today = (35.1, 39.2, 56.2, 22.5)
    eight = (60.1, 72.2, 119.0, 46.9)
