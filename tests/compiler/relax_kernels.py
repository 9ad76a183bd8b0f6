"""Small Relax functions compiled through the targets and run launch by launch from their plan: on the CPU, on a Vulkan
device, in the ISA emulator."""

import json
import math
from dataclasses import dataclass

import numpy as np
import vulkan_harness
from spirv_kernels import validate
from tvm import relax

from mlc_amd.compiler import plan as planning
from mlc_amd.compiler.codegen.kernel_workers import ALONE
from mlc_amd.compiler.codegen.lower import Function, Launch
from mlc_amd.compiler.codegen.rocm import HsacoModule
from mlc_amd.compiler.codegen.target import make_target
from mlc_amd.runtime.devices.cpu import Kernels
from mlc_amd.schedules.gpu.base import profiles
from tests.dev import gfxemu

ALIGN = 64


def module(inputs, body):
    """A module with one function. inputs: name -> array; body(bb, *variables) -> the expression that it returns, which
    may be left for this to emit."""
    bb = relax.BlockBuilder()
    params = [relax.Var(name, relax.TensorType(list(x.shape), str(x.dtype))) for name, x in inputs.items()]
    with bb.function("main", params):
        with bb.dataflow():
            out = bb.emit_output(body(bb, *params))
        bb.emit_func_output(out)
    return bb.get()


@dataclass
class Compiled:
    """A function through a target: its plan and code. launches: of GPU targets, by kernel."""

    backend: object
    plan: planning.LaunchPlan
    folder: object
    code: dict
    kernels: dict

    @property
    def names(self) -> list[str]:
        return [launch["kernel"] for launch in self.plan.functions["main"]]


def compiled(mod, inputs, kind: str, arch: str, folder) -> Compiled:
    backend = make_target(kind, arch)
    mod = backend.select_kernels(mod)
    plan = planning.make_plan(mod, {"main": [("io", name) for name in inputs]}, {}, outputs={"main": (("io", "out"),)})
    code = backend.compile_kernels(mod, folder, lambda *_: None, ALONE)
    return Compiled(backend, plan, folder, json.loads(json.dumps(code)), dict(backend.kernels))


def aligned(nbytes: int) -> np.ndarray:
    """Bytes of garbage at a multiple of 64, as devices allocate."""
    raw = np.full(nbytes + ALIGN, 0xA5, np.uint8)
    start = -raw.ctypes.data % ALIGN
    return raw[start : start + nbytes]


def execute(made: Compiled, inputs, shape, dtype="float32") -> np.ndarray:
    """The function's result on numpy arrays."""
    memory = aligned(made.plan.arena_bytes)
    io = {"out": aligned(math.prod(shape) * np.dtype(dtype).itemsize).view(dtype).reshape(shape)}
    for name, x in inputs.items():
        io[name] = aligned(x.nbytes).view(x.dtype).reshape(x.shape)
        io[name][...] = x

    def array(argument):
        kind, where, *rest = argument
        if kind == "io":
            return io[where]
        of, extents = rest
        nbytes = math.prod(extents) * np.dtype(of).itemsize
        return memory[where : where + nbytes].view(of).reshape(extents)

    run = {"cpu": _cpu, "vulkan": _vulkan, "rocm": _rocm}[made.backend.kind](made)
    for launch in made.plan.functions["main"]:
        run(launch["kernel"], [array(argument) for argument in launch["args"]])
    return io["out"]


def _cpu(made):
    library = Kernels(made.folder / next(iter(made.code["libraries"].values())))

    def run(name, arrays):
        call = library.call(name, arrays)
        call()

    return run


def _vulkan(made):
    (profile_name, file), *_ = made.code["libraries"].items()
    binary, profile = (made.folder / file).read_bytes(), profiles.resolve(profile_name)

    def run(name, arrays):
        entry = made.code["launches"][profile_name][name]
        steps = [
            (
                binary[step["code"][0] : sum(step["code"])],
                step["grid"],
                step["block"],
                tuple(step["args"]),
                tuple(step["writes"]),
                step["table"],
            )
            for step in entry["steps"]
        ]
        for binary_of, *_ in steps:
            validate(binary_of)
        subgroup = profile.wave if profile.subgroups else 0
        results = vulkan_harness.run_spirv(steps, arrays, entry["scratch"], subgroup, profile.push)
        for x, result in zip(arrays, results, strict=True):
            x[...] = result

    return run


def _rocm(made):
    (arch, file), *_ = made.code["libraries"].items()
    binary = (made.folder / file).read_bytes()

    def run(name, arrays):
        entry = made.code["launches"][arch][name]
        launches = tuple(
            Launch(step["symbol"], *(tuple(step[key]) for key in ("grid", "block", "args"))) for step in entry["steps"]
        )
        params = tuple(str(i) for i in range(len(arrays)))
        places = {tuple(step["code"]) for step in entry["steps"]}  # a kernel's launches share a code object
        (place, size), *others = places
        assert not others
        called = {name: Function(params, tuple(entry["scratch"]), launches)}
        found = HsacoModule(binary[place : place + size], called, "")
        gfxemu.emulate(found, name, dict(zip(params, arrays, strict=True)))

    return run
