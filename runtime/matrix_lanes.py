"""Which lane of a subgroup of 32 has which components of a cooperative matrix, by `DeviceKind.lane_unit`. Kernels rely
on it (`gemm_lanes.py` and `gemm_matrix.py` of schedules/gpu/linear, `attention_rows_matrix.py`). Drivers choose the
distribution, and the runtime checks it (runtime/devices/vulkan/fragments.py). Sources: AMD's ISA manuals of RDNA3 and
RDNA4, whose register layouts Mesa's driver uses unchanged; NVIDIA: observed on an H100."""

from dataclasses import dataclass

import numpy as np

LANES = 32
_LANE = np.arange(LANES)[:, None]


@dataclass(frozen=True)
class Distribution:
    """Arrays [lane, component], for the components that a lane has, in order. The columns of A that a lane has, of each
    row, are the rows that it has of B, in the same order; which ones and in which order does not matter.

    a_row, b_column   of the operands
    peer              [lane]: a lane with the same columns of A and rows of B
    sums              rows and columns of results; None: kernels do not rely on these
    """

    a_row: np.ndarray
    b_column: np.ndarray
    peer: np.ndarray
    sums: tuple[np.ndarray, np.ndarray] | None = None


def _of_rows(halves: int, peer: np.ndarray, sum_row: np.ndarray) -> Distribution:
    """The distribution in which lane l has `halves` elements of row l % 16 of A, as many of column l % 16 of B, and
    sums of column l % 16. peer: see `Distribution`. sum_row: [lane, component], the rows of the sums."""
    own = np.repeat(_LANE % 16, halves, axis=1)
    return Distribution(own, own, peer, (sum_row, _LANE % 16 + 0 * sum_row))


_PARTS, _SUM = _LANE // 16, np.arange(8)
DISTRIBUTIONS = {
    "mma": Distribution(_LANE // 4 + np.arange(8) // 4 * 8, np.repeat(_LANE // 4, 4, axis=1), _LANE[:, 0] % 4),
    "wmma11": _of_rows(16, 0 * _LANE[:, 0], 2 * _SUM + _PARTS),
    "wmma12": _of_rows(8, 16 * _PARTS[:, 0], 8 * _PARTS + _SUM),
}
