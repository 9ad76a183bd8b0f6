"""Images among the tokens of a prompt or a sequence: which rows they have, and the positions of these rows for RoPE.

A row of an image is represented by a negative token: a digest of the image's key and the row's number. So pages of the
cache, prefixes and batches identify an image by its contents. `Prompt` has the images' pixels along with the tokens;
`ImageRows` has the places of a sequence's images.

With grid positions (M-RoPE), row (i, j) of an image at position p has the position (p, p + i, p + j), and the next
token has the position p + max(rows, columns). So after an image, a token's position for RoPE is less than its number in
the sequence.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from mlc_amd.runtime.images.prepared import PreparedImage


class Prompt(list[int]):
    """Token ids, among them rows of images. images: by the token of the image's first row. Slices are plain lists."""

    images: Mapping[int, PreparedImage]

    def __init__(self, tokens: Iterable[int] = (), images: Mapping[int, PreparedImage] | None = None) -> None:
        super().__init__(tokens)
        self.images = dict(images or {})

    @classmethod
    def of(cls, pieces: Iterable[Sequence[int] | PreparedImage]) -> "Prompt":
        """A prompt of texts (token ids) and images, in this order."""
        tokens, images = [], {}
        for piece in pieces:
            own = row_tokens(piece) if isinstance(piece, PreparedImage) else piece
            if isinstance(piece, PreparedImage):
                images[own[0]] = piece
            tokens += own
        return cls(tokens, images)


def images_among(tokens: Sequence[int]) -> Mapping[int, PreparedImage]:
    """The images of a `Prompt`; none for other lists."""
    return tokens.images if isinstance(tokens, Prompt) else {}


def row_tokens(image: PreparedImage) -> list[int]:
    """The tokens of an image's rows: numbers below 0, of 32 bits."""
    data = b"".join(blake2b(image.key + row.to_bytes(4, "little"), digest_size=4).digest() for row in range(image.rows))
    return (-1 - (np.frombuffer(data, "<u4") >> 1).astype(np.int64)).tolist()


class ImagePart(NamedTuple):
    """Rows first .. first+count-1 of an image. row: the number of the first of these rows in the chunk."""

    row: int
    image: PreparedImage
    first: int
    count: int


class ImageRows:
    """The images of a sequence. grid: whether positions are those of a grid. together: whether the rows of an image
    attend to one another; then a step must compute the image as a whole, at the beginning of its chunk."""

    def __init__(self, grid: bool = False, together: bool = False) -> None:
        self.grid, self._together = grid, together
        self._starts: list[int] = []
        self._images: list[PreparedImage] = []
        self._counts: list[int] = []  # rows of each image
        # what is added to token numbers to get RoPE positions: before the first image, after it, ..
        self._offsets = [0]

    def add(self, start: int, tokens: Sequence[int], images: Mapping[int, PreparedImage]) -> None:
        """Adds the images of new tokens, whose first one is token number `start`."""
        at = 0
        while at < len(tokens):
            image = images.get(tokens[at])
            if image:
                self._starts.append(start + at)
                self._images.append(image)
                self._counts.append(image.rows)
                advance = max(image.grid) if self.grid else image.rows
                self._offsets.append(self._offsets[-1] + advance - image.rows)
            at += image.rows if image else 1

    def truncate(self, count: int) -> None:
        """Called when only the first `count` tokens are kept."""
        kept = bisect_right(self._starts, count - 1)
        del self._starts[kept:], self._images[kept:], self._counts[kept:], self._offsets[kept + 1 :]
        if kept:
            self._counts[-1] = min(self._counts[-1], count - self._starts[-1])

    def place(self, token: int) -> int:
        """The position for RoPE of token number `token`, which is no image's."""
        return token + self._offsets[bisect_right(self._starts, token)]

    def places(self, first: int, count: int) -> np.ndarray | None:
        """The positions (t, y, x) of `count` tokens from number `first` on, int32 [count, 3]; None: their numbers."""
        if not self.grid:
            return None
        numbers = np.arange(first, first + count, dtype=np.int32)
        offsets = np.array(self._offsets, np.int32)[np.searchsorted(self._starts, numbers, "right")]
        found = np.repeat((numbers + offsets)[:, None], 3, 1)
        for part in self.parts(first, count):
            start = self.place(first + part.row - part.first - 1) + 1
            rows, columns = np.divmod(np.arange(part.first, part.first + part.count), part.image.grid[1])
            own = found[part.row : part.row + part.count]
            own[:, 0], own[:, 1], own[:, 2] = start, start + rows, start + columns
        return found

    def parts(self, first: int, count: int) -> Iterator[ImagePart]:
        """The parts of images among the tokens first .. first+count-1."""
        for i in range(max(bisect_right(self._starts, first) - 1, 0), len(self._starts)):
            start, image = self._starts[i], self._images[i]
            begin, end = max(first, start), min(first + count, start + self._counts[i])
            if start >= first + count:
                break
            if begin < end:
                yield ImagePart(begin - first, image, begin - start, end - begin)

    def whole(self, first: int) -> int:
        """How many rows attend to one another at the beginning of a chunk that begins with token number `first`."""
        i = bisect_right(self._starts, first) - 1
        return self._counts[i] if self._together and i >= 0 and self._starts[i] == first else 0

    def cut(self, first: int, count: int) -> int:
        """How many of `count` tokens from number `first` on a step computes. It computes at least the image that begins
        there, and ends before the next image."""
        if self._together:
            following = next((start for start in self._starts if start > first), first + count)
            count = max(min(count, following - first), self.whole(first))
        return count

    def begin(self, count: int) -> int:
        """`count`; or the first token of an image that must be computed as a whole, if `count` is inside it."""
        part = next(self.parts(count, 1), None) if self._together else None
        return count - part.first if part else count

    def known(self, first: int, count: int, has: Callable[[PreparedImage], bool]) -> int:
        """How many of `count` tokens from number `first` on come before the first image without features."""
        return next((part.row for part in self.parts(first, count) if not has(part.image)), count)
