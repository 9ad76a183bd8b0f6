"""Keeps what an encoder made of images: features [rows, columns] by the image's key, the most recently used ones.

Requests keep their images, so features that were dropped are computed again.
"""

from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np

from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.images.prepared import PreparedImage
from mlc_amd.runtime.images.rows import ImagePart
from mlc_amd.runtime.images.threads import parts, share

LIMIT = 512 << 20  # bytes: 8192 rows of float32 of a model with 4096 columns and three layers of deepstack


class Encoder(Protocol):
    def prepare(self, image: PreparedImage) -> object:
        """Computes everything needed to encode an image except its pixels. Thread-safe."""
        ...

    def pieces(
        self, images: Sequence[PreparedImage], busy: Callable[[], bool]
    ) -> Generator[None, None, list[np.ndarray]]:
        """Encodes images in pieces, smaller ones while `busy`. Returns the features of each image, [rows, columns]."""
        ...


class Features:
    """Keeps features of at most `limit` bytes; those of the last image in any case. Except for `prepare`, only the
    thread that computes steps may call it."""

    def __init__(self, encoder: Encoder | None = None, limit: int = LIMIT) -> None:
        self.encoder = encoder
        self._limit, self._bytes = limit, 0
        self._found: OrderedDict[bytes, np.ndarray] = OrderedDict()  # the most recently used ones are at the end

    def __contains__(self, image: PreparedImage) -> bool:
        return image.key in self._found

    def add(self, image: PreparedImage, features: np.ndarray) -> None:
        self._bytes += features.nbytes - (self._found.pop(image.key).nbytes if image in self else 0)
        self._found[image.key] = features
        while self._bytes > self._limit and len(self._found) > 1:
            self._bytes -= self._found.popitem(last=False)[1].nbytes

    def _needed(self) -> Encoder:
        if self.encoder is None:
            raise UserError("this model takes no images: compile it with its file of the encoder (--mmproj)")
        return self.encoder

    def prepare(self, images: Iterable[PreparedImage]) -> None:
        """Called by a request's thread, so that `encode` takes less time later. Raises UserError for images that the
        encoder cannot take, and if there is no encoder."""
        for image in images:
            if image not in self:
                self._needed().prepare(image)

    def encode(self, images: Iterable[PreparedImage], busy: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """Computes, piece by piece, the features of the first missing image, and of as many images after it as fit.
        Raises UserError if there is no encoder."""
        encoder = self._needed()
        missing, rows = list({image.key: image for image in images if image not in self}.values()), 0
        size = max((found.nbytes // len(found) for found in self._found.values()), default=0)
        for count, image in enumerate(missing):
            rows += image.rows
            if count and (not size or rows * size > self._limit // 2):
                missing = missing[:count]
                break
        found = yield from encoder.pieces(missing, busy)
        for image, features in zip(missing, found, strict=True):
            self.add(image, features)

    def require(self, images: Iterable[PreparedImage]) -> None:
        """Computes the features of the first missing images without a break; see `encode`."""
        for _ in self.encode(images):
            pass

    def put(self, chunk: Iterable[ImagePart], first: int, target: np.ndarray) -> None:
        """Writes the features for a step to `target`, [rows, columns]. chunk: its parts of images. first: the chunk's
        first row. Rows of texts become zeros."""
        copies, end = [], 0
        for row, image, begin, count in chunk:
            own = self._found[image.key][begin : begin + count]
            self._found.move_to_end(image.key)
            target[end : first + row] = 0
            end = first + row + count
            copies += zip(parts(target[first + row : end]), parts(own), strict=True)
        target[end:] = 0
        share(np.copyto, copies)
