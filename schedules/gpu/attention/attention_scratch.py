"""The buffers in device memory that the splits of decode attention join through: how many splits there may be, and how
large that makes them."""

from tvm.tirx.script import builder as T

from mlc_amd.schedules.gpu.base.arrival import LINE
from mlc_amd.schedules.gpu.base.quantize import WIDTH
from mlc_amd.schedules.operators.attention import SLOTS
from mlc_amd.schedules.tir import Buffer

MAX_SPLITS, SEVERAL = 32, 8  # of a row, at most: with up to SEVERAL rows; the others have SEVERAL at least
MAX_PARTS = SEVERAL * max(SLOTS, MAX_SPLITS)  # rows times splits that there is memory for


def max_splits(m: int) -> int:
    """Splits that each of m rows may have: a launch with many rows has workgroups for all of them, most of which have
    nothing to do."""
    return max(SEVERAL, MAX_SPLITS * SEVERAL // max(m, SEVERAL))


def stride_of(group: int, d: int) -> int:
    """float32 of a split's results in Parts, whole cache lines: the rows' outputs, then (top, total, -, -) of each
    row."""
    return -(-group * (d + WIDTH) // LINE) * LINE


def scratch_shapes(heads: int, d: int) -> dict[str, tuple[tuple[int, ...], str]]:
    """Parameter name -> (shape, dtype) of the buffers that splits join through, large enough for every plan and SLOTS
    rows. d: columns of a head's output. "Arrived" must be zero before the first launch and is zero after each; "Parts"
    may hold anything."""
    return {"Parts": ((heads * MAX_PARTS * stride_of(1, d),), "float32"), "Arrived": ((SLOTS * heads,), "int32")}


def scratch_args(heads: int, d: int) -> list[Buffer]:
    """Declares the parameters Parts and Arrived."""
    return [T.arg(name, T.buffer(*shape)) for name, shape in scratch_shapes(heads, d).items()]
