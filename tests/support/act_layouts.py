"""Activations in the layouts of `schedules/gpu/base/quantize.py`, and back, in numpy."""

import numpy as np

from mlc_amd.schedules.gpu.base.planes import BLOCK
from mlc_amd.schedules.gpu.base.quantize import RUN, RUN_COLUMNS, RUNS, TOKENS, unit_size


def in_pairs(x: np.ndarray) -> np.ndarray:
    """A numpy array [..., k] with the columns of each block in this order; k is a multiple of 32."""
    return x.reshape(*x.shape[:-1], -1, BLOCK)[..., np.ravel(RUN_COLUMNS)].reshape(x.shape)


def from_pairs(x: np.ndarray) -> np.ndarray:
    """The inverse of `in_pairs`."""
    return x.reshape(*x.shape[:-1], -1, BLOCK)[..., np.argsort(np.ravel(RUN_COLUMNS))].reshape(x.shape)


def lanes_shape(m: int, k: int, group: int) -> tuple[int, int, int]:
    """Of H for m tokens of k columns in the layout "lanes"."""
    return -(-m // TOKENS), -(-k // (group * BLOCK)), unit_size(group)


def in_lanes(x: np.ndarray, group: int) -> np.ndarray:
    """A numpy array [m, k], k a multiple of 32, in the layout "lanes"; what does not exist is 0."""
    m, k = x.shape
    tiles, groups, _ = lanes_shape(m, k, group)
    whole = np.zeros((tiles * TOKENS, groups * group * BLOCK), x.dtype)
    whole[:m, :k] = in_pairs(x)
    return whole.reshape(tiles, TOKENS, groups, group, RUNS, RUN).transpose(0, 2, 4, 1, 3, 5).reshape(tiles, groups, -1)
