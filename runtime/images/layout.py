"""The layout of an encoder's rows: how the patches of an image become its input rows, and how its output rows become
the rows (tokens) of the image.

In: the manifest's entry of the encoder (`Vision`), an image's size in patches, learned tables. Out: `Layout`: the order
of patches, the position of each token's output, and the encoder's inputs for each row.

Rows come in groups of merge x merge patches; a group becomes a token. Groups are in the order of tokens, or with
windows, window by window. The class token, if there is one, has a group of its own at the end. Rows that only pad a
group attend to themselves only.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Layout:
    """y, x: int [rows], the patch of each row; -1 for a row that is no patch. live: number of rows that attend to one
    another. tokens: int [tokens], each token's group. windows: int32 [rows, 2], first row and end of a row's window."""

    y: np.ndarray
    x: np.ndarray
    live: int
    tokens: np.ndarray
    windows: np.ndarray

    @property
    def rows(self) -> int:
        return len(self.y)


def layout(vision: Mapping[str, Any], height: int, width: int) -> Layout:
    """The layout of an image of height x width patches; both are multiples of `merge`."""
    merge, window = vision["merge"], vision["window"]
    rows, columns = height // merge, width // merge
    ty, tx = (axis.ravel() for axis in np.mgrid[0:rows, 0:columns])
    order = np.arange(rows * columns)
    if window:
        order = np.lexsort((tx, ty, tx // window, ty // window))
    gy, gx = ty[order], tx[order]
    iy, ix = np.divmod(np.arange(merge * merge), merge)
    if vision["nested"]:  # each 2 x 2 patches are consecutive, and a window
        number, inner = np.divmod(np.arange(merge * merge), 4)
        iy, ix = number // (merge // 2) * 2 + inner // 2, number % (merge // 2) * 2 + inner % 2
    y, x = (gy[:, None] * merge + iy).ravel(), (gx[:, None] * merge + ix).ravel()
    live = len(y) + bool(vision["class_row"])
    if vision["class_row"]:
        y, x = (np.append(axis, np.full(merge * merge, -1)) for axis in (y, x))
    group = np.argsort(order) if window else order
    final = np.lexsort((ty, tx)) if vision["by_column"] else np.arange(len(order))
    number = gy // max(window, 1) * columns + gx // max(window, 1)
    starts = np.flatnonzero(np.diff(number, prepend=-1)) if window else np.zeros(1, int)
    ends = np.append(starts[1:], len(order))
    own = np.repeat(np.stack([starts, ends], 1), ends - starts, 0) * merge * merge
    windows = np.repeat(own, merge * merge, 0)
    if vision["nested"]:
        begin = np.arange(len(windows)) // 4 * 4
        windows = np.stack([begin, begin + 4], 1)
    return Layout(y, x, live, group[final], windows.astype(np.int32))


def patch_lines(size: int, height: int, width: int, of: Layout) -> np.ndarray:
    """Where the lines of each row's patch begin: int [rows, 3 * size], by colour and line; in units of `size` pixels of
    an image of height x width patches. Rows that are no patch have the lines of the first patch."""
    first = (np.maximum(of.y, 0) * size * width + np.maximum(of.x, 0))[:, None, None]
    color, line = np.ogrid[0:3, 0:size]
    return (first + color * (height * size * width) + line * width).reshape(of.rows, 3 * size)


def put_patches(pixels: np.ndarray, lines: np.ndarray, y: np.ndarray, found: np.ndarray) -> None:
    """Copies patches of an image, float32 [3, height, width], to `found`, float32 [rows, 3 * size * size], by colour,
    row and column; 0 for rows that are no patch. lines, y: of these rows, from `patch_lines` and the layout."""
    line = np.dtype((np.void, found.itemsize * found.shape[1] // lines.shape[1]))
    # If the target rows have further columns, numpy would read them first, and a GPU's memory is slow to read: so the
    # patches are put together in host memory.
    rows = found if found.flags.c_contiguous else np.empty(found.shape, found.dtype)
    np.take(pixels.reshape(-1).view(line), lines, out=rows.view(line), mode="clip")
    rows[y < 0] = 0
    if rows is not found:
        found[...] = rows


def neighbours(of: Layout) -> tuple[np.ndarray, np.ndarray]:
    """The rows that 3 x 3 convolutions with stride 2 read, where groups of 2 x 2 are consecutive: int32 [rows / 4, 9]
    for each group of patches, and [rows / 16, 9] for each group of these groups; -1 outside of the image."""
    found, (dy, dx) = [], np.divmod(np.arange(9), 3)
    for each in (1, 4):
        y, x = of.y[::each] // (2 if each > 1 else 1), of.x[::each] // (2 if each > 1 else 1)
        place = np.full((y.max() + 3, x.max() + 3), -1, np.int32)  # with a border
        place[y + 1, x + 1] = np.arange(len(y))
        found.append(place[y[::4, None] + dy, x[::4, None] + dx])
    return found[0], found[1]


# ---- learned positions


def _taps(name: str, count: int, side: int) -> np.ndarray:
    """float32 [count, side]: the weights of `side` learned positions for each of `count` positions along an axis, as in
    llama.cpp's ggml_interpolate (ggml-cpu/ops.cpp), which has float32 coordinates."""
    if count == side and name != "buckets":
        return np.eye(side, dtype=np.float32)
    one, source = np.float32(1), np.arange(side)
    if name == "buckets":  # SigLIP's positions for images of any shape
        return np.eye(side, dtype=np.float32)[np.arange(count) * side // count]
    if name == "aligned":
        scale = np.float32(count - 1) / np.float32(side - 1) if count > 1 and side > 1 else np.float32(count / side)
        at = np.arange(count, dtype=np.float32) / scale
    else:
        scale = np.float32(count) / np.float32(side)
        at = (np.arange(count, dtype=np.float32) + np.float32(0.5)) / scale
    if name == "smooth":
        support = max(one, one / scale)
        first = np.maximum(np.trunc(at - support + np.float32(0.5)), 0)
        end = np.minimum(np.trunc(at + support + np.float32(0.5)), side)
        weights = np.maximum(one - abs((source - at[:, None] + np.float32(0.5)) / support), 0)
        weights = np.where((source >= first[:, None]) & (source < end[:, None]), weights, 0)
        return (weights / weights.sum(1, keepdims=True)).astype(np.float32)
    at = at if name == "aligned" else at - np.float32(0.5)
    low = np.floor(at).astype(int)
    found = np.zeros((count, side), np.float32)
    for offset, weight in _NEIGHBOURS["cubic" if name == "cubic" else "linear"](at, low, side):
        np.add.at(found, (np.arange(count), np.clip(low + offset, 0, side - 1)), weight)
    return found


def _linear(at: np.ndarray, low: np.ndarray, side: int):
    part = np.clip(at - np.clip(low, 0, side - 1), 0, 1)
    return (0, 1 - part), (1, part)


def _cubic(at: np.ndarray, low: np.ndarray, side: int):
    part, a = at - low, -0.75
    near, far = (lambda x: ((a + 2) * x - (a + 3)) * x * x + 1), (lambda x: ((a * x - 5 * a) * x + 8 * a) * x - 4 * a)
    return (-1, far(part + 1)), (0, near(part)), (1, near(1 - part)), (2, far(2 - part))


_NEIGHBOURS: dict[str, Callable] = {"linear": _linear, "cubic": _cubic}


def positions(vision: Mapping[str, Any], table: np.ndarray, height: int, width: int) -> np.ndarray:
    """The learned positions of an image, float32 [height, width, columns]. table: float32 [positions, columns], without
    the class token's row. Raises ValueError if the table does not fit this size."""
    name, columns = vision["table"], table.shape[1]
    if name == "axes":  # first the positions of columns, then those of rows
        x, y = table.reshape(2, -1, columns)
        if max(height, width) > len(x):
            raise ValueError(f"{height} x {width} patches are more than the encoder's {len(x)} along an axis")
        return x[:width] + y[:height, None]
    side = round(len(table) ** 0.5)
    if side * side != len(table) or (name == "rows" and (height, width) != (side, side)):
        raise ValueError(f"{height} x {width} patches do not go with an encoder of {len(table)} positions")
    rows, places = table.reshape(side, side, columns), (_taps(name, count, side) for count in (height, width))
    down, across = places
    return np.tensordot(across, np.tensordot(down, rows, 1), (1, 1)).transpose(1, 0, 2)


def angles(turns: Mapping[str, Any], columns: int, of: Layout) -> np.ndarray:
    """The rotation of each row, float32 [rows, 2 * columns]: cosines, then signed sines, for the columns of a head.
    Rows that are no patches are not rotated."""
    quarter, span = columns // 4, turns["span"]
    axes = {"x": of.x, "y": of.y}
    along = [np.where(of.y < 0, 0, axes[axis] + turns["first"]) for axis in turns["axes"]]
    speeds = turns["theta"] ** (-2 * np.arange(quarter) / (columns // 2))
    scales = (1.0, turns["theta"] ** (-2 / columns) if turns["odd"] else 1.0)
    each = np.stack([at[:, None] * (speeds * scale) for at, scale in zip(along, scales, strict=True)], 1)
    column = np.arange(columns)
    if span == columns:
        half, number = column % (columns // 2) // quarter, column % quarter
    else:  # pairs are within a half
        half, inner = column // (columns // 2), column % (columns // 2)
        number = inner // 2 if span == 2 else inner % quarter
    found = each[:, half, number]
    sign = np.where(column % span < span // 2, -1, 1)
    return np.concatenate([np.cos(found), np.sin(found) * sign], 1).astype(np.float32)
