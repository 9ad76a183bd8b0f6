"""Encodes images on the device of an artifact. In: pixels. Out: rows of features, which take the place of tokens.

A run encodes several images, packed one after the other into the smallest function that holds them (layout.py). Inputs
that depend only on an image's shape take long to compute for a large image. `prepare` computes them in the thread of
the request; they are kept as long as the image, and for further images of that shape. Several threads write a run's
patches to the device's memory, and copy the features from there.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import lru_cache, partial
from itertools import accumulate, chain
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from mlc_amd.runtime.artifact.io_names import ENCODED
from mlc_amd.runtime.artifact.manifest import PIECE
from mlc_amd.runtime.artifact.ranks import segments
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.images.layout import Layout, angles, layout, neighbours, patch_lines, positions, put_patches
from mlc_amd.runtime.images.prepared import PreparedImage
from mlc_amd.runtime.images.threads import begin, parts, share, wait

# limit of patches in a run of several images that are not small: with more, activations no longer fit the caches
_AT_ONCE = 4096
_PATCHES = 1024  # patches whose pixels one thread writes; starting a thread takes as long as a few hundred
_SHAPES = 16  # number of shapes whose inputs are kept without their images; the tiles of a picture have few shapes
_TABLE, _CLASS, _BREAK, _BIAS = "v.position_embd.weight", "v.class_embd", "v.token_embd.img_break", "v.patch_embd.bias"


class ImageEncoder:
    """The encoder of an artifact, on its open device. Only `prepare` is thread-safe. Steps of the decoder and other
    encodings may only run between two pieces of a run. Raises UserError for an artifact without an encoder."""

    def __init__(self, artifact, device):
        vision = artifact.manifest.get("vision")
        if vision is None:
            raise UserError(f"{artifact.path} has no image encoder; compile the model with --mmproj FILE")
        self.vision, self._device = vision, device
        self._each = vision["merge"] ** 2
        self._functions = sorted((patches, name) for name, patches in vision["buckets"].items())
        self.most = self._functions[-1][0]  # patches of the largest run
        functions = artifact.manifest["functions"]
        self._cut = {name: segments(functions, name, PIECE) for _, name in self._functions}
        weights: Any = artifact.weights
        self._vectors = {
            name: np.array(weights[name]) for name in (_TABLE, _CLASS, _BREAK, _BIAS) if name in weights.header
        }
        self._of = lru_cache(_SHAPES)(self._shape)
        self._prepared: WeakKeyDictionary[PreparedImage, _Shape] = WeakKeyDictionary()
        # what the inputs of places on the device belong to: the function's patches, and (height, width) of each image
        self._written: tuple[int, list[tuple[int, int]]] | None = None
        self._writing: list[Future] = []  # writes to the arrays of `_memory`
        self._begun: object = None  # the run whose intermediate results the device has
        entry = artifact.manifest["io"][ENCODED]
        self._columns, self._type = entry["shape"][1], np.dtype(entry["dtype"])

    def encode(self, images: Sequence[PreparedImage]) -> list[np.ndarray]:
        """The features of each image, float32 or float16 [rows, columns]. Raises UserError as `prepare` does."""
        return [*chain(*self._runs(self._groups(images, self.most, min(self.most, _AT_ONCE)), lambda: False))]

    def pieces(
        self, images: Sequence[PreparedImage], busy: Callable[[], bool]
    ) -> Generator[None, None, list[np.ndarray]]:
        """`encode` in pieces: after each `yield`, the device may do other work. A piece is a piece of a function; while
        not `busy`, as many pieces as the smallest function has are submitted together. Returns what `encode`
        returns."""
        found: list[np.ndarray] = []
        smallest, name = self._functions[0]
        for features in self._runs(self._groups(images, smallest, smallest), busy, len(self._cut[name])):
            found += features
            if len(found) < len(images):
                yield
        return found

    def prepare(self, image: PreparedImage) -> "_Shape":
        """What encoding an image takes besides its pixels. Raises UserError if the encoder cannot take the image."""
        if (found := self._prepared.get(image)) is None:
            found = self._prepared[image] = self._of(*self._patches(image))
        return found

    def rows(self, image: PreparedImage) -> int:
        """The number of rows (patches and padding) that an image takes in a run; at most `most`."""
        return self.prepare(image).of.rows

    def _groups(self, images: Sequence[PreparedImage], small: int, large: int) -> Iterator[list[PreparedImage]]:
        """Groups of consecutive images with limited numbers of patches; at least one image each. small: the limit for
        images that fit the smallest function. large: the limit for others."""
        group: list[PreparedImage] = []
        filled = 0
        for image in images:
            count = self.rows(image)
            most = small if max(map(self.rows, [*group, image])) <= self._functions[0][0] else large
            if group and filled + count > most:
                yield group
                group, filled = [], 0
            group.append(image)
            filled += count
        if group:
            yield group

    def _patches(self, image: PreparedImage) -> tuple[int, int]:
        size, (_, height, width) = self.vision["patch"], image.pixels.shape
        each = size * self.vision["merge"]
        if height % each or width % each or not height or not width:
            raise UserError(f"an image of {width} x {height} pixels cannot be divided into squares of {each} pixels")
        return height // size, width // size

    def _shape(self, height: int, width: int) -> "_Shape":
        vision, of = self.vision, layout(self.vision, height, width)
        if of.rows > self.most:
            raise UserError(
                f"an image of {width} x {height} patches is more than the {self.most} that this model was compiled "
                "for; compile it with a larger --ctx, or give a smaller image"
            )
        inputs = {"added": self._added(of, height, width)} if "added" in vision["io"] else {}
        if turns := vision["turns"]:
            inputs["turns"] = angles(turns, vision["io"]["turns"] // 2, of)
        lines = patch_lines(vision["patch"], height, width, of)
        return _Shape(of, inputs, lines, np.array_equal(of.tokens, np.arange(of.rows // self._each)))

    def _added(self, of: Layout, height: int, width: int) -> np.ndarray:
        """The learned positions; for the class token also its vector, less the bias that all rows get."""
        vision, columns = self.vision, self.vision["io"]["added"]
        table = self._vectors[_TABLE].reshape(-1, columns) if vision["table"] else np.zeros((1, columns), np.float32)
        first = None
        if vision["class_row"]:
            first, table = (table[0], table[1:]) if vision["class_row"] == "first" else (table[-1], table[:-1])
        found = np.zeros((of.rows, columns), np.float32)
        patch = of.y >= 0
        if vision["table"]:
            try:
                found[patch] = positions(vision, table, height, width)[of.y[patch], of.x[patch]]
            except ValueError as error:
                raise UserError(f"this encoder cannot take the image: {error}") from error
        if first is not None:
            bias = self._vectors.get(_BIAS, np.zeros(columns, np.float32))
            found[of.live - 1] = self._vectors[_CLASS][:columns] + first - bias[:columns]
        return found

    def _runs(
        self, groups: Iterable[Sequence[PreparedImage]], busy: Callable[[], bool], most: int | None = None
    ) -> Iterator[list[np.ndarray]]:
        """Yields the features of each group's images, and [] between pieces of a run. most: the number of pieces that
        are submitted together, None: all. While `busy`, they are submitted one by one, and writing each input counts as
        a piece. If another run came between the pieces of a run, it begins again."""
        for run in [self._packed(group) for group in groups]:
            functions, this, done, found = self._cut[run.function], object(), 0, []
            unwritten: Iterator[bool] = iter(())
            while done < len(functions):
                if self._begun is not this:
                    self._begun, done, unwritten = this, 0, self._writes(run)
                if next(unwritten, False):
                    if busy():
                        yield []
                    continue
                if not done:
                    found = self._memory(run)
                self._write_counts(run)
                *fed, last = functions[done:][: 1 if busy() else most]
                for piece in fed:
                    self._device.feed(piece)
                self._device.run(last)
                done += len(fed) + 1
                if done < len(functions):
                    yield []
            yield self._features(run, found)

    def _packed(self, images: Sequence[PreparedImage]) -> "_Run":
        shapes = [*map(self.prepare, images)]
        starts = [*accumulate((shape.of.rows for shape in shapes), initial=0)]
        size, name = next(one for one in self._functions if one[0] >= starts[-1])
        return _Run(images, shapes, starts, size, name)

    def _put(self, run: "_Run", patches: np.ndarray) -> None:
        """Writes the pixels of a run's patches to the first columns of `patches`, float32 [patches, columns]."""
        each = []
        for image, shape, start in run.each():
            for first in range(0, shape.of.rows, _PATCHES):
                some = slice(first, min(first + _PATCHES, shape.of.rows))
                own = patches[start + some.start : start + some.stop, : 3 * self.vision["patch"] ** 2]
                each.append((image.pixels, shape.lines[some], shape.of.y[some], own))
        share(put_patches, each)

    @staticmethod
    def _put_inputs(run: "_Run", key: str, rows: np.ndarray) -> None:
        """Writes an input that belongs to shapes, for all images of a run."""
        copies = []
        for shape, start in zip(run.shapes, run.starts, strict=False):
            copies += zip(parts(rows[start : start + shape.of.rows]), parts(shape.inputs[key]), strict=True)
        share(np.copyto, copies)

    def _writes(self, run: "_Run") -> Iterator[bool]:
        """Writes the device's inputs. Yields True after each, because a large one takes as long as a step."""
        self._device.fill("patches", run.starts[-1], partial(self._put, run))
        yield True
        written = run.size, [*map(self._patches, run.images)]
        if self._written != written:
            self._written = None
            for key in run.shapes[0].inputs:
                self._device.fill(key, run.starts[-1], partial(self._put_inputs, run, key))
                yield True
            for key, rows in self._places(run).items():
                if key in self.vision["io"]:
                    self._device.write(key, rows)
            self._written = written
            yield True

    def _write_counts(self, run: "_Run") -> None:
        """Writes the inputs that steps of the decoder use, too."""
        total = run.starts[-1]
        groups = total // (4 if self.vision["nested"] else self._each)
        self._device.write("state", (0, total, 0, 0))
        self._device.write("answers", (groups, groups, 0, 0))

    def _memory(self, run: "_Run") -> list[np.ndarray]:
        """Arrays for the features of each image. Threads write them once while the device computes, so that the system
        allocates their pages then, and not while the features are copied."""
        found = [np.empty((shape.of.rows // self._each, self._columns), self._type) for shape in run.shapes]
        self._writing = [begin(part.fill, 0.0) for rows in found for part in parts(rows)]
        return found

    def _features(self, run: "_Run", found: list[np.ndarray]) -> list[np.ndarray]:
        """The features of each image, after the run. found: the arrays of `_memory`."""
        rows, copies = self._device.read(ENCODED, run.starts[-1] // self._each), []
        for target, start in zip(found, run.starts, strict=False):
            copies += zip(parts(target), parts(rows[start // self._each :][: len(target)]), strict=True)
        wait(self._writing)
        share(np.copyto, copies)
        return [self._finished(rows, *of) for rows, of in zip(found, run.each(), strict=True)]

    def _places(self, run: "_Run") -> dict[str, np.ndarray]:
        """The inputs that follow from the positions of the images' rows."""
        size, shapes, starts, total, io = run.size, run.shapes, run.starts, run.starts[-1], self.vision["io"]
        segments = np.stack([np.arange(total), np.arange(1, total + 1)], 1).astype(np.int32)
        windows = segments.copy()
        for shape, start in zip(shapes, starts, strict=False):
            segments[start : start + shape.of.live] = start, start + shape.of.live
            windows[start : start + len(shape.of.windows)] = shape.of.windows + start
        rows = {"segments": segments, "windows": windows}
        if "neighbours" in io:  # groups of the second convolution come after all that the first one may have
            found = [neighbours(shape.of) for shape in shapes]
            rows["neighbours"] = table = np.full((size // 4 + total // 16, io["neighbours"]), -1, np.int32)
            for (patches_taken, groups_taken), start in zip(found, starts, strict=False):
                for taken, first, each in ((patches_taken, 0, 4), (groups_taken, size // 4, 16)):
                    at = first + start // each
                    table[at : at + len(taken)] = np.where(taken < 0, -1, taken + start * 4 // each)
        return rows

    def _finished(self, result: np.ndarray, image: PreparedImage, shape: "_Shape", _: int) -> np.ndarray:
        """The rows of an image. If the encoder has line breaks: with one after each row of tokens except the last row.
        result: a row for each group."""
        found = result if shape.in_order else result[shape.of.tokens]
        if self.vision["breaks"]:
            width = image.pixels.shape[2] // self.vision["patch"] // self.vision["merge"]
            ends = np.arange(width, len(found), width)
            found = np.insert(found, ends, self._vectors[_BREAK][: found.shape[1]], 0)
        if len(found) != image.rows:
            raise UserError(f"an image became {len(found)} rows, but the prompt has {image.rows} rows for it")
        return found


class _Shape(NamedTuple):
    """What depends on an image's shape only. of: the layout. inputs: the encoder's inputs, by name. lines: see
    `patch_lines`. in_order: whether token i is group i."""

    of: Layout
    inputs: dict[str, np.ndarray]
    lines: np.ndarray
    in_order: bool


class _Run(NamedTuple):
    """Images that are encoded together. starts: first row of each, and the last end. size: patches of the function."""

    images: Sequence[PreparedImage]
    shapes: list[_Shape]
    starts: list[int]
    size: int
    function: str

    def each(self) -> Iterator[tuple[PreparedImage, _Shape, int]]:
        return zip(self.images, self.shapes, self.starts, strict=False)
