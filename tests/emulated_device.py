"""A device that runs a rocm artifact in the ISA emulator (tests/gfxemu.py finds it): the plan of the real artifact, its real code objects,
numpy memory. Slow: tiny models only."""

import numpy as np


class EmulatedDevice:
    """The protocol of runtime/devices/__init__.py. Every launch must leave no LDS access un-waited at a barrier."""

    kind = "rocm"

    def __init__(self, artifact, arch: str, emulator, wave_order="fwd"):
        self.artifact, self.name, self.threads = artifact, f"emulated {arch}", 1
        manifest = artifact.manifest
        self.emulator, self.wave_order, self.instructions = emulator, wave_order, {}
        self.code = emulator.CodeObject((artifact.path / manifest["libraries"][arch]).read_bytes())
        self.launches = manifest["launches"][arch]
        self.io = {name: np.zeros(entry["shape"], entry["dtype"]) for name, entry in manifest["io"].items()}
        self.kv = {entry["name"]: np.zeros(entry["shape"], entry["dtype"]) for entry in manifest["kv"]}
        self.arena = np.zeros(manifest["arena_bytes"], np.uint8)

    def write(self, name, values):
        self.io[name][: len(values)] = values

    def read(self, name, rows):
        return self.io[name][:rows]

    def clear(self):
        for array in self.kv.values():
            array[:] = 0

    def run(self, function):
        spec = self.artifact.manifest["functions"][function]
        for step in spec["launches"]:
            self.call(step, spec)

    def call(self, step, spec):
        kernel = self.launches[step["kernel"]]
        buffers = [self.buffer(arg, spec) for arg in step["args"]] + [np.zeros(size, np.uint8) for size in kernel["scratch"]]
        for launch in kernel["steps"]:
            arrays = [buffers[i] for i in launch["args"]]
            result = self.emulator.launch(
                self.code, launch["symbol"], tuple(launch["grid"]), tuple(launch["block"]), arrays, wave_order=self.wave_order
            )
            assert not result.hazards, (launch["symbol"], result.hazards)
            self.instructions[launch["symbol"]] = self.instructions.get(launch["symbol"], 0) + result.total

    def buffer(self, arg, spec):
        kind, where = arg[:2]
        if kind == "arena":
            dtype = np.dtype(arg[2])
            count = int(np.prod(arg[3]))
            return self.arena[where : where + count * dtype.itemsize].view(dtype).reshape(arg[3])
        if kind == "weight":
            return self.artifact.weights[where]
        if kind == "kv":
            return self.kv[where]
        rows = {"state": 4, "tokens": spec["tokens"], "logits": spec["tokens"] if spec["all_logits"] else 1}[where]
        return self.io[where][:rows]
