"""The sizes to which pictures are resized, and how they are cut, in integers and float32. Sizes are (width, height).

The formulas agree with llama.cpp's `mtmd-image.cpp` (v0.5.0) to the last bit, because one pixel more changes the
features. Its sources: `smart_resize` of Qwen2-VL, LLaVA-UHD (arXiv:2403.11703), LLaVA-NeXT's `select_best_resolution`,
the image processors of LFM2-VL, Idefics3, Step3-VL and Muse Glimmer in transformers.
"""

import math
from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

import numpy as np

Size = tuple[int, int]  # width, height
Box = tuple[int, int, int, int]  # left, top, right, bottom
_f = np.float32


def rounded(value: Any) -> int:
    """C's `round`: rounds halves away from zero. value: must not be negative."""
    return math.floor(float(value) + 0.5)


def fitted(size: Size, align: int, least: int = 0, most: int = 0, longest: int = 0) -> Size:
    """A size of about the same shape whose edges are multiples of `align`. least, most: limits of its pixels, 0: none.
    longest: the size is first scaled to this longer edge, 0: it is not."""
    if longest:
        scale = min(_f(longest) / _f(edge) for edge in size)
        width, height = (math.ceil(_f(edge) * scale / _f(align)) * align for edge in size)
    else:
        width, height = (max(align, rounded(_f(edge) / _f(align)) * align) for edge in size)
    area = _f(size[1]) * _f(size[0])
    if most and width * height > most:
        beta = np.sqrt(area / _f(most))
        width, height = (max(align, math.floor(_f(edge) / beta / _f(align)) * align) for edge in size)
    elif least and width * height < least:
        beta = np.sqrt(_f(least) / area)
        width, height = (math.ceil(_f(edge) * beta / _f(align)) * align for edge in size)
    return width, height


def within(size: Size, target: Size) -> Size:
    """The largest size of this shape that fits `target`; edges are rounded up."""
    scale = min(_f(target[0]) / _f(size[0]), _f(target[1]) / _f(size[1]))
    width, height = (min(math.ceil(_f(edge) * scale), most) for edge, most in zip(size, target, strict=True))
    return width, height


def boxes(size: Size, tile: Size) -> list[Box]:
    """The boxes of a picture's tiles, row by row."""
    return [
        (x, y, min(x + tile[0], size[0]), min(y + tile[1], size[1]))
        for y in range(0, size[1], tile[1])
        for x in range(0, size[0], tile[0])
    ]


def best_resolution(size: Size, candidates: Iterable[Size]) -> Size:
    """The candidate that keeps most of the picture's pixels; of equal ones, that with the fewest unused pixels."""
    best, shown, rest = (0, 0), 0, math.inf
    for candidate in candidates:
        scale = min(_f(candidate[0]) / _f(size[0]), _f(candidate[1]) / _f(size[1]))
        pixels = min(int(_f(size[0]) * scale) * int(_f(size[1]) * scale), size[0] * size[1])
        waste = candidate[0] * candidate[1] - pixels
        if pixels > shown or (pixels == shown and waste < rest):
            best, shown, rest = candidate, pixels, waste
    return best


def square_grids(side: int, most: int) -> list[Size]:
    """Llama 4: resolutions with up to most x most squares, at least 2."""
    return [(x * side, y * side) for x, y in product(range(1, most + 1), repeat=2) if x * y > 1]


def tile_grids(side: int, least: int, most: int) -> list[Size]:
    """InternVL: resolutions with `least` to `most` squares in all."""
    pairs = product(range(least, most + 1), repeat=2)
    return [(x * side, y * side) for x, y in pairs if least <= x * y <= most]


# ---- LLaVA-UHD without fixed resolutions: MiniCPM-V


def divisible(length: int, step: int) -> int:
    return max(rounded(_f(length) / _f(step)) * step, step)


def resized_to(size: Size, side: int, step: int, enlarge: bool) -> Size:
    """About side x side pixels in the picture's shape. A smaller picture is enlarged only if `enlarge`."""
    width, height = size
    if width * height > side * side or enlarge:
        shape = _f(width) / _f(height)
        height = int(_f(side) / np.sqrt(shape))
        width = int(_f(height) * shape)
    return divisible(width, step), divisible(height, step)


def slice_grid(size: Size, side: int, most: int = 9) -> Size:
    """The numbers of columns and rows of slices with about side x side pixels each."""
    wanted = min(math.ceil(_f(size[0]) * _f(size[1]) / _f(side * side)), most)
    shape = _f(math.log(_f(size[0]) / _f(size[1])))
    best, error = (1, 1), math.inf
    for count in (wanted - 1, wanted, wanted + 1):
        for columns in range(1, count + 1) if count != 1 and count <= most else ():
            if count % columns == 0:
                found = _f(abs(shape - math.log(columns / (count // columns))))
                if found < error:
                    best, error = (columns, count // columns), found
    return best


def slices_size(size: Size, grid: Size, side: int, step: int) -> Size:
    """The size of the picture before it is cut to the grid."""
    one = divisible(size[0], grid[0]) // grid[0], divisible(size[1], grid[1]) // grid[1]
    width, height = resized_to(one, side, step, True)
    return width * grid[0], height * grid[1]


# ---- other models' own


def lfm2_grid(size: Size, side: int, least: int = 2, most: int = 10) -> Size:
    """The numbers of columns and rows of tiles with the shape closest to the picture's. Of equally close ones, the
    larger one if the picture is large enough."""
    grids = [(x, y) for n in range(least, most + 1) for x in range(1, n + 1) for y in range(1, n + 1)]
    grids = [grid for grid in dict.fromkeys(grids) if least <= grid[0] * grid[1] <= most]
    shape, area = _f(size[0]) / _f(size[1]), _f(size[0] * size[1])
    best, error = (1, 1), _f(np.finfo(_f).max)
    for grid in sorted(grids, key=lambda grid: grid[0] * grid[1]):
        found = abs(shape - _f(grid[0]) / _f(grid[1]))
        larger = area > _f(0.5) * _f(side * side * grid[0] * grid[1])
        if found < error or (found == error and larger):
            best, error = grid, found
    return best


def idefics3_size(size: Size, longest: int) -> Size:
    """The size with the longer edge `longest` and an even shorter edge."""
    shape = size[0] / size[1]
    if size[0] >= size[1]:
        other = int(longest / shape)
        return longest, other + other % 2
    other = int(longest * shape)
    return other + other % 2, longest


def glimmer_size(size: Size, step: int, most: int) -> Size:
    """The size of the grid of at most `most` squares of `step` pixels whose shape is closest to the picture's."""
    rows, columns = size[1] / step, size[0] / step
    shape = columns / rows if rows > 0 else 1.0
    if rows * columns > most:
        rows = math.sqrt(most / shape)
        columns = rows * shape
    grids = product(*((math.floor(edge), math.ceil(edge)) for edge in (rows, columns)))
    valid = [(y, x) for y, x in grids if y >= 1 and x >= 1 and y * x <= most]
    if not valid:
        return max(1, rounded(columns)) * step, max(1, rounded(rows)) * step
    y, x = min(valid, key=lambda grid: (abs(grid[0] / grid[1] - size[1] / size[0]), -grid[0] * grid[1]))
    return x * step, y * step


STEP3_CROP = 504


def step3_window(size: Size, side: int) -> int:
    """The edge of the windows that Step3-VL shows in addition to the whole picture; 0: there are none."""
    shorter, longer = sorted(size)
    shape = _f(longer) / _f(shorter)
    if longer <= side:
        return shorter if shape > 1.5 else 0
    return min(shorter, STEP3_CROP) if shape > 4 else STEP3_CROP


def step3_extent(length: int, window: int) -> int:
    """The length of an edge before it is cut: whole windows, unless it is shorter than one."""
    ratio = _f(length) / _f(window)
    if ratio < 1:
        return length
    whole = math.floor(ratio)
    return window * (whole + (1 if ratio - _f(whole) > _f(0.2) else 0))


def step3_starts(length: int, window: int) -> Sequence[int]:
    """Where windows begin along an edge."""
    count = 1 if length <= window else math.ceil(_f(length - window) / _f(window) + _f(1))
    starts = [window * place for place in range(count)]
    if count > 1 and starts[-1] + window > length:
        starts[-1] = length - window
    return starts
