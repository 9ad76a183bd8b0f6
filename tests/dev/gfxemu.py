"""Runs compiled GPU kernels without a GPU, in an emulator of AMD's instruction sets (gfx11, gfx12, and gfx90a, gfx942,
gfx950); a library: tests use it.

The emulator is not part of this repository. It is a folder (GFXEMU, default ../shared/tools/gfxemu beside the
repository) with `run_hsaco.py`, `mixed.py` and the part of tinygrad a9069c177 that they drive; TINYGRAD_SRC names
another checkout of tinygrad. It compiles its operations with clang, a third of a second each, which takes most of a
short run's time: GFXEMU_OPERATIONS may name a folder that keeps them for other processes. Corrections to tinygrad that
run_hsaco.py lacks are made here; each states what hardware does.
"""

import functools
import hashlib
import importlib
import inspect
import os
import pickle
import shutil
import sys
import tempfile
import textwrap
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from mlc_amd.runtime.errors import UserError

FOLDER = Path(os.environ.get("GFXEMU", Path(__file__).resolve().parents[3] / "shared" / "tools" / "gfxemu"))
CLANGS = ("clang", *(f"clang-{version}" for version in range(22, 16, -1)))
SNAPSHOT = (
    6  # the emulator's buffers are numbered 0..5, 1 the vector registers; here: their copy from before the instruction
)
QUANTUM = 20  # instructions
ACTIVE = "isinstance(inst, (irc.VOP1, irc.VOP1_DPP16, irc.VOP2, irc.VOP2_DPP16))"

# function of the emulator: (its text, what it should say)
CORRECTIONS = {
    # DPP: all lanes read before any writes, also when source and destination are the same register
    "_load_dpp16_src0": [
        (
            "swizzled = ctx.rvgpr_dyn(ctx.inst_field(type(inst).vsrc0), safe_src_lane)",
            "swizzled = UOp.param(6, dtypes.uint32, (256 * "
            "ctx.wave_size,)).index(ctx.inst_field(type(inst).vsrc0).cast(dtypes.int)"
            " * _c(ctx.wave_size, dtypes.int) + safe_src_lane).load()",
        )
    ],
    # LDS writes take accumulation registers, too, where the instruction says so (`acc`); and, as run_hsaco.py has it,
    # the parts of an address in scratch memory are a 32-bit sum
    "_compile_mem_op": [
        (
            "  def make_srcs(lane: UOp) -> dict:\n    addr = make_addr(lane)\n",
            "  def make_srcs(lane: UOp) -> dict:\n    addr = make_addr(lane)\n"
            "    held = ctx.raccvgpr_dyn if use_acc else ctx.rvgpr_dyn\n",
        ),
        *((f"ctx.rvgpr_dyn({data}", f"held({data}") for data in ("vdata_reg", "data1_reg")),
        (
            "return base + addr_offset + saddr_contrib + offset64",
            "return base + ((addr_offset + saddr_contrib + offset64) & UOp.const(0xFFFFFFFF, dtypes.uint64))",
        ),
    ],
    # lane permutations take literal operands
    "_Ctx.compile_lane_pcode": [
        (
            f"self.rsrc_dyn(src{i}_off, _c(0, dtypes.int)) if src{i}_off",
            f"self.rsrc_dyn(src{i}_off, _c(0, dtypes.int), 32, self.optional_field(inst, 'literal')) if src{i}_off",
        )
        for i in (1, 2)
    ],
    # MFMA of float16 keeps denormals; rows of 32 x 32 results interleave in groups of four. Bytes are words, as all
    # that is multiplied: clang refuses vectors of the other sign. Operands may be in accumulation registers (`acc`)
    "_compile_mfma": [
        (
            "raw = is_vgpr.where(ctx.rvgpr_dyn(off",
            "held = ctx.raccvgpr_dyn if _iattr(inst, 'acc') >> (base > 0) & 1 else ctx.rvgpr_dyn\n"
            "      raw = is_vgpr.where(held(off",
        ),
        (
            "return (byte.cast(dtypes.int32) ^ UOp.const(0x80, dtypes.int32)) - UOp.const(0x80, dtypes.int32)",
            "return ((byte.cast(dtypes.int32) ^ UOp.const(0x80, dtypes.int32)) - UOp.const(0x80, dtypes.int32))"
            ".bitcast(dtypes.uint32)",
        ),
        (
            "return exp.eq(_c(0)).where(_c(0), f32_bits)",
            "return exp.eq(_c(0)).where((sign << _c(31)) | (mant.cast(dtypes.float32) * UOp.const(2.0**-24, "
            "dtypes.float32))"
            ".bitcast(dtypes.uint32), f32_bits)",
        ),
        (
            "m_base = c_grp * UOp.const(16, dtypes.int) + UOp.const((out_reg // 4) * 4 + out_reg % 4, dtypes.int)",
            "m_base = c_grp * UOp.const(4, dtypes.int) + UOp.const(out_reg // 4 * 8 + out_reg % 4, dtypes.int)",
        ),
    ],
    # 16-bit operands in v128 and above are plain registers on gfx9 (upper halves of v0.. on gfx11 and later only)
    "_compile_vop12": [
        ("write_hi_half = bits['d'] == 16 and", f"write_hi_half = not {ACTIVE} and bits['d'] == 16 and"),
        ("vsrc1_hi = bits['s0'] == 16 and", f"vsrc1_hi = not {ACTIVE} and bits['s0'] == 16 and"),
    ],
    "_load_vsrc0": [("if bits['s0'] == 16:", f"if bits['s0'] == 16 and not {ACTIVE}:")],
}


def missing() -> str:
    """What the emulator needs and this machine lacks; "" where it can run."""
    if not (FOLDER / "run_hsaco.py").is_file():
        return f"no ISA emulator in {FOLDER}"
    if "TINYGRAD_SRC" not in os.environ and not (FOLDER / "tinygrad").is_dir():
        return f"no tinygrad in {FOLDER} (TINYGRAD_SRC names a checkout)"
    return "" if any(map(shutil.which, CLANGS)) else f"the ISA emulator needs clang ({CLANGS[-1]} or newer)"


def load():
    """run_hsaco with a corrected emulator. UserError where `missing` names something."""
    if why := missing():
        raise UserError(why)
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))
    _provide_clang()
    if kept := os.environ.get("GFXEMU_OPERATIONS"):
        os.environ["CCACHE"] = "0"  # tinygrad's own cache, a file that processes would wait for
    run_hsaco = importlib.import_module("run_hsaco")

    emu = run_hsaco.emulator()
    if not hasattr(emu, "corrected"):
        _correct(emu)
        if kept:
            _keep_operations(emu, Path(kept) / _version()[:16])
        emu.corrected = True
    return run_hsaco


@functools.cache
def _provide_clang() -> tempfile.TemporaryDirectory | None:
    """The emulator runs `clang`, which Debian names after its version: PATH gets a folder with a link. It lives as long
    as the process."""
    if shutil.which("clang"):
        return None
    folder = tempfile.TemporaryDirectory(prefix="mlc-amd-clang-")
    (Path(folder.name) / "clang").symlink_to(next(filter(None, map(shutil.which, CLANGS))))
    os.environ["PATH"] += os.pathsep + folder.name
    return folder


def _source(emu, name: str) -> str:
    """Of the emulator's function of that name, as its file has it."""
    lines = inspect.getsource(emu).splitlines(keepends=True)
    first = next(i for i, line in enumerate(lines) if line.lstrip().startswith(f"def {name}("))
    return textwrap.dedent("".join(inspect.getblock(lines[first:])))


def _correct(emu):
    for name, changes in CORRECTIONS.items():
        *owner, name = name.split(".")
        owner = getattr(emu, owner[0]) if owner else emu
        old = getattr(owner, name)
        source = _source(emu, name)
        for before, after in changes:
            assert before in source, f"the emulator's {name} is not the version that is corrected here"
            source = source.replace(before, after)
        defined = {}
        exec(compile(source, f"corrected {name}", "exec"), emu.__dict__, defined)
        setattr(owner, name, defined[name])
        for kind, handler in list(emu._INST_HANDLERS.items()):
            if handler is old:
                emu._INST_HANDLERS[kind] = defined[name]
    pcode, decode, field = emu.get_pcode, emu._decode_at, emu._iattr

    def attribute(inst, name, default=0):
        """Atomics that return a value say so in `sc0` on CDNA and in a bit of `th` on gfx12, not in `glc`."""
        if name == "glc" and not hasattr(inst, "glc"):
            return field(inst, "sc0", field(inst, "th") & 1)
        return field(inst, name, default)

    emu._iattr = attribute
    # permlanex16: its parser takes ~row[0] for all bits of the complement
    emu.get_pcode = lambda op: pcode(op).replace("altrow = { row[1], ~row[0] }", "altrow = row ^ 1")

    def decode_at(pc, arch):
        (program, runner), inst = decode(pc, arch)
        if SNAPSHOT not in program.arg.globals:
            return (program, runner), inst
        places = [g for g in program.arg.globals if g != SNAPSHOT]
        size = 256 * 4 * emu._wave_size(arch)

        def run(*buffers):
            given = dict(zip(places, buffers, strict=True))
            copy = emu.ctypes.create_string_buffer(emu.ctypes.string_at(given[1].value, size), size)
            given[SNAPSHOT] = emu.ctypes.c_uint64(emu.ctypes.addressof(copy))
            runner.fxn(*[given[g] for g in program.arg.globals])

        return (SimpleNamespace(arg=SimpleNamespace(globals=places)), SimpleNamespace(fxn=run)), inst

    emu._decode_at = decode_at


def _version() -> str:
    """Of what operations are compiled by: the emulator's modules, its corrections, and the CPU that runs them."""
    names = [n for n in sys.modules if n == "run_hsaco" or n.startswith(("tinygrad.", "test.mockgpu."))]
    files = [Path(file) for n in sorted(names) if (file := getattr(sys.modules[n], "__file__", None))]
    cpu = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")), "")
    return hashlib.sha256(cpu.encode() + b"".join(file.read_bytes() for file in [*files, Path(__file__)])).hexdigest()


def _keep_operations(emu, folder: Path) -> None:
    """Compiled operations are taken from `folder`, a file each, and new ones put there. Any number of processes may do
    so at once."""
    folder.mkdir(parents=True, exist_ok=True)
    known, device = emu._canonical_runner_cache, emu.Device["CPU"]

    for path in folder.glob("*.operation"):
        operation = pickle.loads(path.read_bytes())
        module, name = operation["type"]
        program = SimpleNamespace(arg=SimpleNamespace(globals=operation["globals"]))
        code = {"name": operation["name"], "lib": operation["lib"], "signature": ()}
        runner = device.runtime(SimpleNamespace(**code, target=SimpleNamespace(renderer="")))
        known.append((getattr(importlib.import_module(module), name), *operation["pattern"], (program, runner)))
    compiled = emu._get_runner

    def get_runner(instruction: bytes, arch: str):
        before = len(known)
        found = compiled(instruction, arch)
        for kind, *pattern, (program, runner) in known[before:]:
            operation = {"type": (kind.__module__, kind.__name__), "pattern": pattern, "name": runner.name}
            operation |= {"globals": list(program.arg.globals), "lib": program.to_elf().lib}
            data = pickle.dumps(operation)
            path = folder / f"{hashlib.sha256(repr((operation['type'], pattern)).encode()).hexdigest()[:32]}.operation"
            part = path.with_suffix(f".{os.getpid()}")
            part.write_bytes(data)
            part.replace(path)
        return found

    emu._get_runner = get_runner


def emulate(module, function: str, arrays: dict[str, np.ndarray], wave_order="rev"):
    """Runs a PrimFunc of an HsacoModule, one workgroup after the other. arrays: by parameter name, contiguous, outputs
    are written in place. LDS, registers and scratch start as garbage. wave_order: "fwd", "rev" or a seed, the order of
    a workgroup's waves between barriers. Returns the launches' results (total, by_mnemonic). AssertionError if LDS
    operations are not waited for at a barrier."""
    run_hsaco = load()

    def launch(code, step, args):
        result = run_hsaco.launch(code, step.symbol, step.grid, step.block, args, wave_order=wave_order)
        assert not result.hazards, f"{step.symbol}: {result.hazards}"
        return result

    return _launches(run_hsaco, module, function, arrays, launch)


def emulate_interleaved(module, function: str, arrays: dict[str, np.ndarray], seed: int, first=None):
    """As `emulate`, with all workgroups of a launch under way at once: a random wave of a random workgroup runs up to
    QUANTUM instructions, then another one. first: workgroups (x, y, z) in the order in which they run to their end
    instead. Returns for each launch the workgroups in the order in which they executed atomics, and in which they
    ended. Memory is sequentially consistent: orders are tried, caches are not."""
    run_hsaco = load()
    mixed = importlib.import_module("mixed")

    def launch(code, step, args):
        return mixed.launch_mixed(code, step.symbol, step.grid, step.block, args, seed, QUANTUM, first)[:2]

    return _launches(run_hsaco, module, function, arrays, launch)


def _launches(run_hsaco, module, function: str, arrays: dict[str, np.ndarray], launch) -> list:
    called = module.functions[function]
    for name in called.params:
        assert arrays[name].flags["C_CONTIGUOUS"]
    buffers = [arrays[name] for name in called.params] + [np.full(size, 0xA5, np.uint8) for size in called.scratch]
    code = run_hsaco.CodeObject(module.hsaco)
    return [launch(code, step, [buffers[i] for i in step.args]) for step in called.launches]
