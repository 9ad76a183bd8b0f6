"""What rows of queries take of a wave's registers and of shared memory: those with products per lane
(`attention_rows.py`) and those on matrix units (`attention_rows_matrix.py`), and which layers get the latter."""

from typing import NamedTuple

from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.gpus import RATES
from mlc_amd.schedules.gpu.attention.attention_step import OTHER_BYTES
from mlc_amd.schedules.gpu.attention.cache_units import WORDS
from mlc_amd.schedules.gpu.base.matrices import SIDE, known_unit
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.quantize import WIDTH
from mlc_amd.schedules.operators.attention import PAGE, Attention

STEP = PAGE  # keys of a block, at most: the maximum is renewed once per block
# 16-byte loads in flight per lane. Fewer loads make less code.
LOADS, FEWER_LOADS = 8, 4
# On AMD's own API: of few rows, of others, of latent attention, whose outputs take most registers
MANY_LOADS, FEW_ROWS, LATENT_LOADS = 32, 8, 8
SPLITS = 32  # maximum of splits whose weights are in shared memory


def query_dtype(arch: Device) -> str:
    """The type of queries in shared memory, that in which they are multiplied."""
    return "float16" if arch.api == "rocm" else "float32"


def dot_waves_of(arch: Device, count: int, d: int, threads: int) -> int:
    """Waves of a workgroup for `count` rows of `d` elements: those of `threads`, fewer where the arch or its shared
    memory has no more. UserError if it does not suffice for one."""
    waves = min(threads, arch.threads) // arch.wave
    # of a wave: what its rows have there, and a key
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
    loads: int  # of 16 bytes that a lane has in flight
    step: int = STEP  # keys of a block
    ahead: bool = False  # whether registers hold the keys of the next block, too


def key_loads(arch: Device, attention: Attention, count: int) -> KeyLoads:
    """The rule: fewer where nothing is known of a device's registers, or where rows take them."""
    if arch.api == "vulkan":
        return KeyLoads(LOADS if arch.registers else FEWER_LOADS)
    return KeyLoads(MANY_LOADS if count <= FEW_ROWS and not attention.values else LATENT_LOADS)


# ---- on matrix units

CHUNK = 32  # keys that blocks are multiples of
SCORES = 16  # of a lane's row, that it has at once
PAD = 1  # units of WIDTH float32 after a row in shared memory: rows begin in different banks
# Of a lane's registers, those for outputs, queries, scores and what is loaded: LLVM needs some 50 more of 256.
ROOM = 176
WIDE = 208  # registers for the former without what is loaded, from which on queries do not stay there


def row_tiles(arch: Device, count: int) -> int:
    """Tiles for `count` rows."""
    return -(-count // known_unit(arch).side)


def out_units(d: int) -> int:
    """Units of WIDTH float32 in shared memory of a row's outputs."""
    return d // WIDTH + PAD


def wave_units(arch: Device, count: int, d: int, step: int) -> int:
    """The same of a wave: scores, in the end outputs."""
    return row_tiles(arch, count) * known_unit(arch).side * out_units(max(d, step))


def _registers(arch: Device, width: int, holds: bool) -> int:
    """Those for what a wave has of a tile of rows, of so many columns: outputs, scores, and all queries or one."""
    unit = known_unit(arch)
    queries = -(-width // unit.columns) if holds else 1
    return width * SIDE // arch.wave + SCORES + queries * (arch.query_registers or unit.units * WORDS)


def suits(arch: Device, attention: Attention) -> bool:
    """Whether the arch has such units and the layer is such as they take for single rows: of whole tiles of columns
    that fit the registers."""
    if not arch.lane_blocks or attention.values:
        return False
    unit = known_unit(arch)
    if not unit.knows_sums:
        return attention.d % unit.columns == 0
    # LLVM moves the queries that a row's own key is multiplied with out of its loop: all of them at once
    return attention.d % SIDE == 0 and _registers(arch, attention.d, arch.api == "rocm") < ROOM


def holds(arch: Device, width: int, tiles: int) -> bool:
    """Whether the queries of so many tiles stay in registers."""
    return tiles * _registers(arch, width, True) < WIDE


def room(arch: Device, width: int, tiles: int) -> int:
    """Registers for what is loaded."""
    return ROOM - tiles * _registers(arch, width, holds(arch, width, tiles))


def pays(arch: Device, rows: int) -> bool:
    """Whether products of 16 rows, of which so many are needed, take no longer than dot products of float16 pairs of
    those alone, which are half as many a clock as those of four bytes."""
    return rows * RATES[arch.family]["matrix16"] >= SIDE * RATES[arch.family]["dot4"] // 2


def waves_of(arch: Device, count: int, d: int, threads: int, step: int) -> int:
    """Waves of a workgroup for `count` rows of `d` elements: those of `threads`, fewer where there is too little shared
    memory. ValueError if it does not suffice for one."""
    waves = min(threads, arch.threads) // arch.wave
    # of a wave: scores or outputs, factors, a key; besides, queries, and weights of splits
    units = wave_units(arch, count, d, step) + row_tiles(arch, count) * arch.wave
    wave = units * WIDTH * 4 + d * 2
    while waves and waves * wave + count * (d * 2 + arch.wave * 4) + OTHER_BYTES > arch.lds:
        waves //= 2
    if not waves:
        raise ValueError(f"{arch.name} has too little shared memory for {count} rows of {d} elements on matrices")
    return waves
