"""Encodes images on the device of an artifact: pixels in, the rows of features that take the place of tokens out.

Several images share a run, packed one after the other into the smallest function that holds them (layout.py). What
depends on an image's shape only takes long for a large one: `prepare` computes it in the thread of a request, and it is
kept as long as the image, and for the next one of that shape. Several threads put a run's patches where the device
takes them, and copy the features that it has made.
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

_AT_ONCE = 4096  # patches of a run of images that are not small: with more of them activations fill no cache any more
_PATCHES = 1024  # of which a thread puts the pixels into place: to start it takes as long as a few hundred
_SHAPES = 16  # of which what is computed is kept without their images: tiles of one picture have few
_TABLE, _CLASS, _BREAK, _BIAS = "v.position_embd.weight", "v.class_embd", "v.token_embd.img_break", "v.patch_embd.bias"


class ImageEncoder:
    """The encoder of an artifact that has one, on its open device. One thread at a time, but for `prepare`; steps of
    the decoder and other encodings only between two pieces. UserError for an artifact without an encoder."""

    def __init__(self, artifact, device):
        vision = artifact.manifest.get("vision")
        if vision is None:
            raise UserError(f"{artifact.path} has no image encoder; compile the model with --mmproj FILE")
        self.vision, self._device = vision, device
        self._each = vision["merge"] ** 2
        self._functions = sorted((patches, name) for name, patches in vision["buckets"].items())
        self.most = self._functions[-1][0]  # patches of a run
        functions = artifact.manifest["functions"]
        self._cut = {name: segments(functions, name, PIECE) for _, name in self._functions}
        weights: Any = artifact.weights
        self._vectors = {
            name: np.array(weights[name]) for name in (_TABLE, _CLASS, _BREAK, _BIAS) if name in weights.header
        }
        self._of = lru_cache(_SHAPES)(self._shape)
        self._prepared: WeakKeyDictionary[PreparedImage, _Shape] = WeakKeyDictionary()
        # of whose places the device has the inputs: the function's patches, and those of each image
        self._written: tuple[int, list[tuple[int, int]]] | None = None
        self._writing: list[Future] = []  # of `_memory`
        self._begun: object = None  # the run of which the device has intermediate results
        entry = artifact.manifest["io"][ENCODED]
        self._columns, self._type = entry["shape"][1], np.dtype(entry["dtype"])

    def encode(self, images: Sequence[PreparedImage]) -> list[np.ndarray]:
        """Of each image float32 or float16 [rows, columns]. UserError for an image that the encoder cannot take."""
        return [*chain(*self._runs(self._groups(images, self.most, min(self.most, _AT_ONCE)), lambda: False))]

    def pieces(
        self, images: Sequence[PreparedImage], busy: Callable[[], bool]
    ) -> Generator[None, None, list[np.ndarray]]:
        """`encode` in pieces, with other work of the device between them: pieces of a function, or while nobody is
        `busy` as many as the smallest function has. Returns what `encode` returns."""
        found: list[np.ndarray] = []
        smallest, name = self._functions[0]
        for features in self._runs(self._groups(images, smallest, smallest), busy, len(self._cut[name])):
            found += features
            if len(found) < len(images):
                yield
        return found

    def prepare(self, image: PreparedImage) -> "_Shape":
        """What encoding an image takes beside its pixels. UserError for an image that the encoder cannot take."""
        if (found := self._prepared.get(image)) is None:
            found = self._prepared[image] = self._of(*self._patches(image))
        return found

    def rows(self, image: PreparedImage) -> int:
        """Patches that an image takes of a run, with what fills them up: `most` at most."""
        return self.prepare(image).of.rows

    def _groups(self, images: Sequence[PreparedImage], small: int, large: int) -> Iterator[list[PreparedImage]]:
        """The images, of up to so many patches at a time, but at least one. small: of images that fit the smallest
        function; large: of others."""
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
            raise UserError(f"an image of {width} x {height} pixels does not divide into squares of {each}")
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
        """Learned positions, and the class token, of which the encoder's own product is the bias."""
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
        """The features of each group's images, and [] between pieces of a run: `most` of them are submitted together,
        None: all, or each by itself while others are busy, to whom its inputs count as one. A run begins again where
        another one came between its pieces."""
        for run in [self._packed(group) for group in groups]:
            functions, this, done, found = self._cut[run.function], object(), 0, []
            while done < len(functions):
                if self._begun is not this:
                    self._begun, done = this, 0
                    self._write(run)
                    found = self._memory(run)
                    if busy():
                        yield []
                        continue
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
        """The pixels of a run's patches, float32 [patches, columns], of which the first are used."""
        each = []
        for image, shape, start in run.each():
            for first in range(0, shape.of.rows, _PATCHES):
                some = slice(first, min(first + _PATCHES, shape.of.rows))
                own = patches[start + some.start : start + some.stop, : 3 * self.vision["patch"] ** 2]
                each.append((image.pixels, shape.lines[some], shape.of.y[some], own))
        share(put_patches, each)

    @staticmethod
    def _put_inputs(run: "_Run", key: str, rows: np.ndarray) -> None:
        """The rows of an input that each shape has its own of."""
        copies = []
        for shape, start in zip(run.shapes, run.starts, strict=False):
            copies += zip(parts(rows[start : start + shape.of.rows]), parts(shape.inputs[key]), strict=True)
        share(np.copyto, copies)

    def _write(self, run: "_Run") -> None:
        """The device's inputs."""
        self._device.fill("patches", run.starts[-1], partial(self._put, run))
        written = run.size, [*map(self._patches, run.images)]
        if self._written != written:
            self._written = written
            for key, rows in self._places(run).items():
                if key in self.vision["io"]:
                    self._device.write(key, rows)
            for key in run.shapes[0].inputs:
                self._device.fill(key, run.starts[-1], partial(self._put_inputs, run, key))

    def _write_counts(self, run: "_Run") -> None:
        """Inputs that steps of the decoder have, too."""
        total = run.starts[-1]
        groups = total // (4 if self.vision["nested"] else self._each)
        self._device.write("state", (0, total, 0, 0))
        self._device.write("answers", (groups, groups, 0, 0))

    def _memory(self, run: "_Run") -> list[np.ndarray]:
        """For the features of each image, written once by threads: the system hands it out then, while the device
        computes, and not while the features are copied."""
        found = [np.empty((shape.of.rows // self._each, self._columns), self._type) for shape in run.shapes]
        self._writing = [begin(part.fill, 0.0) for rows in found for part in parts(rows)]
        return found

    def _features(self, run: "_Run", found: list[np.ndarray]) -> list[np.ndarray]:
        """Those of each image, once the run is done, in `_memory`."""
        rows, copies = self._device.read(ENCODED, run.starts[-1] // self._each), []
        for target, start in zip(found, run.starts, strict=False):
            copies += zip(parts(target), parts(rows[start // self._each :][: len(target)]), strict=True)
        wait(self._writing)
        share(np.copyto, copies)
        return [self._finished(rows, *of) for rows, of in zip(found, run.each(), strict=True)]

    def _places(self, run: "_Run") -> dict[str, np.ndarray]:
        """Inputs that follow from where the images' rows are."""
        size, shapes, starts, total, io = run.size, run.shapes, run.starts, run.starts[-1], self.vision["io"]
        segments = np.stack([np.arange(total), np.arange(1, total + 1)], 1).astype(np.int32)
        windows = segments.copy()
        for shape, start in zip(shapes, starts, strict=False):
            segments[start : start + shape.of.live] = start, start + shape.of.live
            windows[start : start + len(shape.of.windows)] = shape.of.windows + start
        rows = {"segments": segments, "windows": windows}
        if "neighbours" in io:  # rows of the second convolution come after all that the first one may have
            found = [neighbours(shape.of) for shape in shapes]
            rows["neighbours"] = table = np.full((size // 4 + total // 16, io["neighbours"]), -1, np.int32)
            for (patches_taken, groups_taken), start in zip(found, starts, strict=False):
                for taken, first, each in ((patches_taken, 0, 4), (groups_taken, size // 4, 16)):
                    at = first + start // each
                    table[at : at + len(taken)] = np.where(taken < 0, -1, taken + start * 4 // each)
        return rows

    def _finished(self, result: np.ndarray, image: PreparedImage, shape: "_Shape", _: int) -> np.ndarray:
        """The rows of an image, and those that end each row of tokens but the last, if there are such. result: of each
        group."""
        found = result if shape.in_order else result[shape.of.tokens]
        if self.vision["breaks"]:
            width = image.pixels.shape[2] // self.vision["patch"] // self.vision["merge"]
            ends = np.arange(width, len(found), width)
            found = np.insert(found, ends, self._vectors[_BREAK][: found.shape[1]], 0)
        if len(found) != image.rows:
            raise UserError(f"an image became {len(found)} rows, and {image.rows} were planned for it")
        return found


class _Shape(NamedTuple):
    """Of images of one shape: their layout, the encoder's inputs that follow from it, by name, those of `patch_lines`,
    and whether each group is a token, in their order."""

    of: Layout
    inputs: dict[str, np.ndarray]
    lines: np.ndarray
    in_order: bool


class _Run(NamedTuple):
    """Images that a function of `size` patches encodes together, from these rows on; the last start is their end."""

    images: Sequence[PreparedImage]
    shapes: list[_Shape]
    starts: list[int]
    size: int
    function: str

    def each(self) -> Iterator[tuple[PreparedImage, _Shape, int]]:
        return zip(self.images, self.shapes, self.starts, strict=False)
