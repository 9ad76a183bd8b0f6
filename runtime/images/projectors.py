"""The projectors of image encoders: how each cuts a picture, how many tokens a tile becomes, the texts around tiles.

In: the manifest's entry of the encoder: {"projector": a name of `PROJECTORS`, "metadata": values of the mmproj file by
key, "positions": "sequence" or "grid"}. Out: `Preparation.pieces`: the texts and tiles of a picture.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from PIL.Image import Image, Resampling

from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.images import cut, sizes
from mlc_amd.runtime.images.cut import Colour, Parameters, Tile, Tiles
from mlc_amd.runtime.images.prepared import Piece, PreparedImage

_SCALE, _SPATIAL = "clip.vision.projector.scale_factor", "clip.vision.spatial_merge_size"
_LONGEST = "clip.vision.preproc_image_size"


@dataclass(frozen=True)
class Marks:
    """The texts around tiles. before, after: around a picture. whole: around the tile that shows the whole picture.
    part: around each tile that shows a part, with {row} and {column}. A picture of one tile has neither of these two.
    row: between rows of parts. first: whether the whole comes before the parts."""

    before: str = ""
    after: str = ""
    whole: tuple[str, str] = ("", "")
    part: tuple[str, str] = ("", "")
    row: str = ""
    first: bool = False

    def around(self, whole: PreparedImage | None, parts: Sequence[PreparedImage], columns: int) -> list[Piece]:
        if whole is None:
            return [piece for piece in (self.before, *parts, self.after) if piece != ""]
        full: list[Piece] = [self.whole[0], whole, self.whole[1]]
        pieces: list[Piece] = [self.before, *(full if self.first else ())]
        for place, part in enumerate(parts):
            row, column = divmod(place, columns)
            before, after = (text.format(row=row + 1, column=column + 1) for text in self.part)
            pieces += [self.row if row and not column else "", before, part, after]
        pieces += [*(() if self.first else full), self.after]
        return [piece for piece in pieces if piece != ""]


@dataclass(frozen=True)
class Projector:
    """cut: the kind of preprocessing. merge: edge of a token in patches, if metadata lacks `key`. tokens: the least and
    largest number of tokens of a picture; None: limits come from the file, if it has them. resample, pad, grids: see
    `Parameters`. breaks: whether each row of tokens except the last ends with one more token."""

    cut: Callable[[Image, Parameters], Tiles]
    marks: Marks = Marks()
    merge: int = 1
    key: str = _SCALE
    tokens: tuple[int, int] | None = None
    resample: Resampling = Resampling.BICUBIC
    pad: Colour | None = (0, 0, 0)
    grids: Callable[[int, Mapping[str, Any]], Sequence[sizes.Size]] = lambda side, metadata: ()
    longest: Callable[[Mapping[str, Any]], int] = lambda metadata: 0
    breaks: bool = False


def _pinpoints(side: int, metadata: Mapping[str, Any]) -> list[sizes.Size]:
    flat = metadata.get("clip.vision.image_grid_pinpoints") or ()
    return list(zip(flat[::2], flat[1::2], strict=True))


def _internvl(side: int, metadata: Mapping[str, Any]) -> list[sizes.Size]:
    least, most = (
        metadata.get(f"clip.vision.preproc_{name}_tiles", other) for name, other in (("min", 1), ("max", 12))
    )
    return sizes.tile_grids(side, least, most)


def _llava(picture: Image, of: Parameters) -> Tiles:
    return cut.grid(picture, replace(of, pad=(0, 0, 0))) if of.grids else cut.square(picture, of)


_QWEN = Marks("<|vision_start|>", "<|vision_end|>")
_FAKE = "<fake_token_around_image>"
_LFM2 = Marks("<|image_start|>", "<|image_end|>", ("<|img_thumbnail|>", ""), ("<|img_row_{row}_col_{column}|>", ""))
_MINICPM = Marks(whole=("<image>", "</image>"), part=("<slice>", "</slice>"), row="\n", first=True)
_STEP3 = Marks(whole=("<im_start>", "<im_end>"), part=("<patch_start>", "<patch_end>"), row="<patch_newline>")
_IDEFICS3 = Marks(
    whole=(f"\n\n{_FAKE}<global-img>", _FAKE), part=(f"{_FAKE}<row_{{row}}_col_{{column}}>", ""), row="\n"
)
_LINEAR, _LANCZOS = Resampling.BILINEAR, Resampling.LANCZOS
_shaped = cut.own_shape

PROJECTORS: dict[str, Projector] = {
    "gemma3": Projector(cut.square, Marks("<start_of_image>", "<end_of_image>"), 4, resample=_LINEAR),
    "gemma4v": Projector(_shaped, Marks("<|image>", "<image|>"), 3, tokens=(70, 1120)),
    "qwen2vl_merger": Projector(_shaped, _QWEN, 2, _SPATIAL, (8, 4096)),
    "qwen2.5vl_merger": Projector(_shaped, _QWEN, 2, _SPATIAL, (8, 4096)),
    "qwen3vl_merger": Projector(_shaped, _QWEN, 2, _SPATIAL, (8, 4096)),
    "glm4v": Projector(_shaped, Marks("<|begin_of_image|>", "<|end_of_image|>"), 2, _SPATIAL, (8, 4096)),
    "pixtral": Projector(_shaped, Marks(after="[IMG_END]"), 1, _SPATIAL, (8, 1024), breaks=True),
    "lightonocr": Projector(
        _shaped, Marks("<|im_start|>", "<|im_end|>"), 1, _SPATIAL,
        longest=lambda metadata: metadata.get(_LONGEST, metadata["clip.vision.image_size"]),
    ),
    "kimivl": Projector(_shaped, Marks("<|media_start|>", "<|media_end|>"), tokens=(8, 1024)),
    "paddleocr": Projector(_shaped, Marks("<|IMAGE_START|>", "<|IMAGE_END|>"), 2, "", None),
    "lfm2": Projector(cut.lfm2, _LFM2, tokens=(64, 256), resample=_LINEAR),
    "idefics3": Projector(
        cut.idefics3, _IDEFICS3, resample=_LANCZOS, longest=lambda metadata: metadata.get(_LONGEST, 0)
    ),
    "internvl": Projector(cut.grid, Marks("<img>", "</img>"), grids=_internvl),
    "llama4": Projector(
        cut.grid, Marks("<|image_start|>", "<|image_end|>"), grids=lambda side, metadata: sizes.square_grids(side, 3)
    ),
    "mlp": Projector(_llava, key="", pad=(122, 116, 104), grids=_pinpoints),
    "janus_pro": Projector(cut.square, key="", pad=(127, 127, 127)),
    "minicpmv4_6": Projector(cut.slices, _MINICPM, 4),
    "step3vl": Projector(cut.step3, _STEP3, 4, longest=lambda metadata: metadata.get(_LONGEST) or 3024),
    "muse-glimmer": Projector(
        cut.glimmer, Marks("<|image_start|>", "<|image_end|>"), 2, _SPATIAL, (1, 4096), _LANCZOS
    ),
}  # fmt: skip


class Preparation:
    """The preprocessing of one encoder."""

    def __init__(self, vision: Mapping[str, Any]) -> None:
        """vision: see the module's docstring. Raises UserError for an unknown projector or invalid metadata."""
        metadata: Mapping[str, Any] = vision["metadata"]
        self._name: str = vision["projector"]
        if self._name not in PROJECTORS:
            raise UserError(f"images for the projector {self._name} cannot be prepared: use another mmproj file")
        self._projector = projector = PROJECTORS[self._name]
        self._by_grid = vision.get("positions") == "grid"
        try:
            self._parameters = _parameters(projector, metadata)
        except KeyError as error:
            raise UserError(f"metadata key {error.args[0]} is missing; use another mmproj file") from error
        except (TypeError, ValueError, OverflowError) as error:
            why = "no valid sizes, mean and std of images"
            raise UserError(f"the metadata has {why} (clip.vision.image_*); use another mmproj file") from error

    def pieces(self, picture: Image) -> list[Piece]:
        """The texts and tiles of an RGB picture, as they enter the prompt. Raises UserError if it is too narrow."""
        tiles = self._projector.cut(picture, self._parameters)
        whole = None if tiles.whole is None else self._tile(tiles.whole)
        return self._projector.marks.around(whole, [self._tile(part) for part in tiles.parts], tiles.columns)

    def _tile(self, tile: Tile) -> PreparedImage:
        pixels = tile.pixels(self._parameters)
        rows, columns = (edge // self._parameters.step for edge in pixels.shape[1:])
        count = rows * columns + (rows - 1 if self._projector.breaks else 0)
        parameters = f"{self._name} {self._parameters.mean} {self._parameters.std}"
        grid = (rows, columns) if self._by_grid else (1, count)
        return PreparedImage.of(pixels, count, grid, parameters, tile.content)


def _parameters(projector: Projector, metadata: Mapping[str, Any]) -> Parameters:
    def pixels(name: str) -> int:
        return metadata.get(f"clip.vision.image_{name}_pixels", 0)

    side, patch = (int(metadata[f"clip.vision.{name}_size"]) for name in ("image", "patch"))
    mean, std = ([float(value) for value in metadata[f"clip.vision.image_{name}"]][:3] for name in ("mean", "std"))
    step = patch * int(metadata.get(projector.key, projector.merge))
    limits = projector.tokens and [count * step * step for count in projector.tokens]
    least, most = limits or (pixels("min"), pixels("max"))
    longest, grids = projector.longest(metadata), projector.grids(side, metadata)
    if min(side, patch, step) < 1 or side > 1 << 14 or len(mean) < 3 or len(std) < 3 or 0 in std:
        raise ValueError("size, mean or std of images")
    return Parameters(side, patch, step, mean, std, least, most, longest, grids, projector.resample, projector.pad)
