"""Preprocessing: turns a picture into the tiles that an encoder gets: resized, padded, cut and normalized.

In: a PIL image of mode RGB, and `Parameters`, numbers from the encoder's file. Out: `Tiles`. There is one function for
each kind of preprocessing; `projectors.py` chooses it. Sizes are exactly llama.cpp's (`sizes.py`), resizing is
Pillow's. Raises UserError for a picture so narrow that the result would have no or too many pixels.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from PIL import Image as pil
from PIL.Image import Image, Resampling

from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.images import sizes
from mlc_amd.runtime.images.sizes import Size

MOST_PIXELS = 1 << 24  # limit for a resized picture; only extremely narrow pictures exceed it

Colour = tuple[int, int, int]


@dataclass(frozen=True)
class Parameters:
    """side, patch, step: edge in pixels of the encoder's square picture, of a patch, and of the square that becomes a
    token. least, most: limits of the pixels of a picture that keeps its shape. longest: its longer edge, 0: no limit.
    grids: resolutions before cutting. resample: the filter for whole pictures. pad: the colour around pictures; None:
    they are stretched."""

    side: int
    patch: int
    step: int
    mean: Sequence[float]
    std: Sequence[float]
    least: int = 0
    most: int = 0
    longest: int = 0
    grids: Sequence[Size] = ()
    resample: Resampling = Resampling.BICUBIC
    pad: Colour | None = (0, 0, 0)

    def normalized(self, picture: Image) -> np.ndarray:
        """The normalized picture, float32 [3, height, width]."""
        values = np.ascontiguousarray(np.asarray(picture).transpose(2, 0, 1), np.float32)
        mean, std = (np.array(each, np.float32)[:, None, None] for each in (self.mean, self.std))
        values /= np.float32(255)
        values -= mean
        values /= std
        return values


class Tile(NamedTuple):
    """A picture. side: after normalization it is resized to a square with this edge, by linear interpolation without
    antialiasing; 0: it stays as it is."""

    picture: Image
    side: int = 0

    @property
    def content(self) -> bytes:
        """Bytes that determine the pixels together with `Parameters`."""
        return f"{self.picture.size} {self.side} ".encode() + self.picture.tobytes()

    def pixels(self, of: Parameters) -> np.ndarray:
        """The normalized pixels, float32 [3, height, width]."""
        values: Any = of.normalized(self.picture)
        if not self.side or self.picture.size == (self.side, self.side):
            return values
        for axis, edge in ((2, self.picture.width), (1, self.picture.height)):
            f = np.float32
            place = (np.arange(self.side, dtype=f) + f(0.5)) * (f(edge) / f(self.side)) - f(0.5)
            low = np.floor(place)
            first, second = (values.take((low + more).clip(0, edge - 1).astype(int), axis) for more in (0, 1))
            part = (place - low).reshape((self.side, 1) if axis == 1 else self.side)
            values = first + (second - first) * part
        return values


@dataclass(frozen=True)
class Tiles:
    """whole: the whole picture as one tile, for models that mark this tile; None for others. parts: tiles of parts of
    the picture, row by row. columns: their number in a row."""

    whole: Tile | None = None
    parts: list[Tile] = field(default_factory=list)
    columns: int = 1


def resized(picture: Image, size: Size, resample: Resampling, pad: Colour | None = None) -> Image:
    """Resizes a picture. pad: keeps its shape, centered, with this colour around it; None: it is stretched."""
    _check(picture, size, MOST_PIXELS)
    if picture.size == size:
        return picture
    if pad is None:
        # Rows first, then columns: new versions of Pillow choose the order, on which rounding depends, themselves.
        _check(picture, (size[0], picture.height), 4 * MOST_PIXELS)
        return picture.resize((size[0], picture.height), resample).resize(size, resample)
    inner = sizes.within(picture.size, size)
    canvas = pil.new("RGB", size, pad)
    canvas.paste(resized(picture, inner, resample), ((size[0] - inner[0]) // 2, (size[1] - inner[1]) // 2))
    return canvas


def _check(picture: Image, size: Size, most: int) -> None:
    if min(size) < 1 or size[0] * size[1] > most:
        raise UserError(f"the image of {picture.width} x {picture.height} pixels is too narrow: cut it")


def square(picture: Image, of: Parameters) -> Tiles:
    """One square tile."""
    return Tiles(parts=[Tile(resized(picture, (of.side, of.side), of.resample, of.pad))])


def own_shape(picture: Image, of: Parameters) -> Tiles:
    """One tile of about the picture's shape and size."""
    size = sizes.fitted(picture.size, of.step, of.least, of.most, of.longest)
    return Tiles(parts=[Tile(resized(picture, size, of.resample, of.pad))])


def grid(picture: Image, of: Parameters) -> Tiles:
    """A square tile of the whole picture and, unless the picture is small, square tiles of the picture at the
    resolution of `grids` that suits it best."""
    whole = Tile(resized(picture, (of.side, of.side), Resampling.BICUBIC))
    if max(picture.size) <= of.side:
        return Tiles(whole)
    size = sizes.best_resolution(picture.size, of.grids)
    refined = resized(picture, size, Resampling.BICUBIC, of.pad)
    return Tiles(whole, _parts(refined, (of.side, of.side)), size[0] // of.side)


def slices(picture: Image, of: Parameters) -> Tiles:
    """MiniCPM-V: the whole picture and, unless it is small, up to nine slices of about the same shape."""
    size, side = picture.size, of.side
    shaped = of.step == 2 * of.patch and size[0] * size[1] <= side * side
    if shaped or max(size) <= side:
        whole = sizes.resized_to(size, side, of.step, True) if shaped else (side, side)
        return Tiles(Tile(resized(picture, whole, Resampling.BICUBIC)))
    whole = Tile(resized(picture, sizes.resized_to(size, side, of.step, False), Resampling.BICUBIC))
    columns, rows = sizes.slice_grid(size, side)
    full = sizes.slices_size(size, (columns, rows), side, of.step)
    refined = resized(picture, full, Resampling.BICUBIC, of.pad)
    return Tiles(whole, _parts(refined, (full[0] // columns, full[1] // rows)), columns)


def lfm2(picture: Image, of: Parameters) -> Tiles:
    """LFM2: one tile of about the picture's shape; for a large picture this, and tiles of 512 x 512 pixels."""
    whole = own_shape(picture, replace(of, pad=None)).parts
    edges = [max(of.patch, round(edge / of.step) * of.step) for edge in picture.size]
    if edges[0] * edges[1] <= of.most * 2:
        return Tiles(parts=whole)
    side = 512
    columns, rows = sizes.lfm2_grid(picture.size, side)
    refined = resized(picture, (columns * side, rows * side), of.resample, of.pad)
    return Tiles(whole[0], _parts(refined, (side, side)), columns)


def idefics3(picture: Image, of: Parameters) -> Tiles:
    """Idefics3: square tiles of the picture, enlarged to `longest`, and the whole picture as a square tile."""
    side = of.side
    if of.longest:
        picture = resized(picture, sizes.idefics3_size(picture.size, of.longest), of.resample)
        size = -(-picture.width // side) * side, -(-picture.height // side) * side
        refined = resized(picture, size, of.resample)
        whole = resized(refined, (side, side), of.resample)
    else:  # files without this key
        size = sizes.fitted(picture.size, side)
        refined = resized(picture, size, Resampling.BICUBIC, of.pad)
        whole = resized(picture, (side, side), Resampling.BICUBIC)
    return Tiles(Tile(whole), _parts(refined, (side, side)), size[0] // side)


def glimmer(picture: Image, of: Parameters) -> Tiles:
    """Muse Glimmer: one tile with the grid of tokens whose shape is closest to the picture's."""
    size = sizes.glimmer_size(picture.size, of.step, of.most // (of.step * of.step))
    return Tiles(parts=[Tile(resized(picture, size, of.resample))])


def step3(picture: Image, of: Parameters) -> Tiles:
    """Step3-VL: the whole picture as a square, and windows of a large or long one; resized after normalization."""
    shape = picture.width / picture.height
    if min(picture.size) < 32 and (shape > 4 or shape < 1 / 4):
        side = max(picture.size)
        _check(picture, (side, side), 4 * MOST_PIXELS)
        padded = pil.new("RGB", (side, side))
        padded.paste(picture, (0, 0))
        picture = padded
    if max(picture.size) > of.longest:
        scale = np.float32(of.longest) / np.float32(max(picture.size))
        width, height = (max(1, int(np.float32(edge) * scale)) for edge in picture.size)
        picture = resized(picture, (width, height), Resampling.BILINEAR)
    whole = Tile(picture, of.side)
    if not (window := sizes.step3_window(picture.size, of.side)):
        return Tiles(whole)
    width, height = (sizes.step3_extent(edge, window) for edge in picture.size)
    refined = resized(picture, (width, height), Resampling.BILINEAR)
    xs, ys = sizes.step3_starts(width, window), sizes.step3_starts(height, window)
    cut = [refined.crop((x, y, x + window, y + window)) for y in ys for x in xs]  # black outside of the picture
    return Tiles(whole, [Tile(one, sizes.STEP3_CROP) for one in cut], len(xs))


def _parts(picture: Image, tile: Size) -> list[Tile]:
    return [Tile(picture.crop(box)) for box in sizes.boxes(picture.size, tile)]
