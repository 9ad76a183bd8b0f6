"""Kernels of `hip_recorder.Recorder` that are a real artifact's, run in the ISA emulator (`gfxemu.py`)."""

from collections.abc import Callable

from mlc_amd.runtime.devices.hip.code_objects import places


def emulated(manifest: dict, arch: str, code: bytes, run_hsaco, wave_order="fwd") -> dict[str, tuple[int, Callable]]:
    """`kernels` for a Recorder: the real code object's, run in the ISA emulator (run_hsaco, which gfxemu.py corrects).

    wave_order: of a workgroup's waves between barriers, "fwd", "rev" or a seed.
    """
    launches = [step for entry in manifest["launches"][arch].values() for step in entry["steps"]]
    programs = {
        symbol: program
        for (begin, size), symbols in places(launches, len(code)).items()
        for program in [run_hsaco.CodeObject(code[begin : begin + size])]
        for symbol in symbols
    }

    def run(launch, *arrays):
        symbol, grid, block = launch
        result = run_hsaco.launch(programs[symbol], symbol, grid, block, list(arrays), wave_order=wave_order)
        assert not result.hazards, (symbol, result.hazards)

    return {step["symbol"]: (len(step["args"]), run) for step in launches}
