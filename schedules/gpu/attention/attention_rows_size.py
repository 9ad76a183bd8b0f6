"""How many registers of a wave and how much shared memory rows of attention need, in vector instructions
(`attention_rows.py`) and on matrix units (`attention_rows_matrix.py`); which layers use matrix units."""

from typing import NamedTuple

from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.gpus import RATES
from mlc_amd.schedules.gpu.attention.attention_step import OTHER_BYTES
from mlc_amd.schedules.gpu.attention.cache_units import WORDS
from mlc_amd.schedules.gpu.base.matrices import SIDE, known_unit
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.quantize import WIDTH
from mlc_amd.schedules.operators.attention import PAGE, Attention

STEP = PAGE  # upper limit of the keys of a block; the running maximum is renewed once for each block
# 16-byte loads in flight per lane. Fewer loads make less code.
LOADS, FEWER_LOADS = 8, 4
# The same for rocm: MANY_LOADS for up to FEW_ROWS rows; LATENT_LOADS for more rows, and for latent attention, whose
# outputs need the most registers.
MANY_LOADS, FEW_ROWS, LATENT_LOADS = 32, 8, 8
SPLITS = 32  # upper limit of the splits whose weights are in shared memory


def query_dtype(arch: Device) -> str:
    """The dtype of queries in shared memory, in which they are multiplied."""
    return "float16" if arch.api == "rocm" else "float32"


def dot_waves_of(arch: Device, count: int, d: int, threads: int) -> int:
    """The waves of a workgroup for `count` rows of `d` elements: as many as `threads` threads have, or fewer if the
    arch or its shared memory allows fewer. Raises UserError if shared memory does not suffice for one wave."""
    waves = min(threads, arch.threads) // arch.wave
    # bytes of shared memory: of the workgroup, and of each wave (its rows' weights or outputs, and a key)
    fixed, wave = count * (d + SPLITS) * 4 + OTHER_BYTES, (count * max(d, STEP) + d) * 4
    while waves * wave + fixed > arch.lds:
        waves //= 2
        if not waves:
            raise UserError(
                f"{arch.name} has too little shared memory for attention with {count} query heads of {d} elements per "
                "KV head"
            )
    return waves


class KeyLoads(NamedTuple):
    loads: int  # 16-byte loads that a lane has in flight
    step: int = STEP  # keys of a block
    ahead: bool = False  # whether the keys of the next block are in registers, too


def key_loads(arch: Device, attention: Attention, count: int) -> KeyLoads:
    """The rule: fewer loads if a device's number of registers is unknown, or if the rows need many registers."""
    if arch.api == "vulkan":
        return KeyLoads(LOADS if arch.registers else FEWER_LOADS)
    return KeyLoads(MANY_LOADS if count <= FEW_ROWS and not attention.values else LATENT_LOADS)


# ---- on matrix units

CHUNK = 32  # the keys of a block are a multiple of this
SCORES = 16  # scores that a lane has at the same time for its row
PAD = 1  # units of WIDTH float32 after each row in shared memory, so that rows begin in different banks
# Registers of a lane for outputs, queries, scores and loaded operands. LLVM needs about 50 more, of 256.
ROOM = 176
WIDE = 208  # if outputs, queries and scores need so many registers, queries are loaded for each product instead


def row_tiles(arch: Device, count: int) -> int:
    """The number of tiles for `count` rows."""
    return -(-count // known_unit(arch).side)


def out_units(d: int) -> int:
    """The units of WIDTH float32 in shared memory for the outputs of a row."""
    return d // WIDTH + PAD


def wave_units(arch: Device, count: int, d: int, step: int) -> int:
    """The units of WIDTH float32 in shared memory for a wave: for scores, and at the end for outputs."""
    return row_tiles(arch, count) * known_unit(arch).side * out_units(max(d, step))


def _registers(arch: Device, width: int, holds: bool) -> int:
    """The registers of a lane for a tile of rows of `width` columns: outputs, scores, and queries (holds: all of them,
    otherwise one)."""
    unit = known_unit(arch)
    queries = -(-width // unit.columns) if holds else 1
    return width * SIDE // arch.wave + SCORES + queries * (arch.query_registers or unit.units * WORDS)


def suits(arch: Device, attention: Attention) -> bool:
    """Whether the arch has matrix units that suit the layer's single rows: its columns must be whole tiles, and must
    fit into registers."""
    if not arch.lane_blocks or attention.values:
        return False
    unit = known_unit(arch)
    if not unit.knows_sums:
        return attention.d % unit.columns == 0
    # LLVM moves the loads of queries for a row's own key out of the loop, so all of them need registers
    return attention.d % SIDE == 0 and _registers(arch, attention.d, arch.api == "rocm") < ROOM


def holds(arch: Device, width: int, tiles: int) -> bool:
    """Whether the queries of `tiles` tiles stay in registers."""
    return tiles * _registers(arch, width, True) < WIDE


def room(arch: Device, width: int, tiles: int) -> int:
    """The registers of a lane for loaded operands."""
    return ROOM - tiles * _registers(arch, width, holds(arch, width, tiles))


def pays(arch: Device, rows: int) -> bool:
    """Whether matrix products of 16 rows take no longer than dot products of float16 pairs of the `rows` rows that are
    needed. (A GPU computes half as many dot products of pairs per clock as of four bytes.)"""
    return rows * RATES[arch.family]["matrix16"] >= SIDE * RATES[arch.family]["dot4"] // 2


def waves_of(arch: Device, count: int, d: int, threads: int, step: int) -> int:
    """The waves of a workgroup for `count` rows of `d` elements: as many as `threads` threads have, or fewer if there
    is too little shared memory. Raises ValueError if it does not suffice for one wave."""
    waves = min(threads, arch.threads) // arch.wave
    # units of a wave: scores or outputs, factors, a key; of the workgroup: queries, and weights of splits
    units = wave_units(arch, count, d, step) + row_tiles(arch, count) * arch.wave
    wave = units * WIDTH * 4 + d * 2
    while waves and waves * wave + count * (d * 2 + arch.wave * 4) + OTHER_BYTES > arch.lds:
        waves //= 2
    if not waves:
        raise ValueError(f"{arch.name} has too little shared memory for {count} rows of {d} elements on matrices")
    return waves
