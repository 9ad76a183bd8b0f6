"""Turns texts with images into the pieces of a prompt: token ids, and tiles for the encoder.

In: a text in which `IMAGE` stands for each image, and the files of the images, in this order. Out: lists of token ids
and `PreparedImage`s, for `rows.Prompt.of`. The marks of images and tiles (`projectors.py`) are in the token ids. The
most recently prepared images are kept, as the next turn of a conversation has the same images.
"""

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.extras import installed
from mlc_amd.runtime.images.pictures import decode
from mlc_amd.runtime.images.prepared import Piece, PreparedImage
from mlc_amd.runtime.images.rows import Prompt
from mlc_amd.runtime.text.messages import IMAGE
from mlc_amd.runtime.text.tokenizer import Tokenizer
from mlc_amd.runtime.text.traced_text import Traced

PLACE = "<image>"  # stands for an image in texts that users write
_KEPT = 256 << 20  # bytes of pixels

PromptPiece = list[int] | PreparedImage


class ImagePrompts:
    """Makes the prompts of one model. Thread-safe. vision: the manifest's entry; None if the model has no encoder."""

    def __init__(self, tokenizer: Tokenizer, vision: Mapping[str, Any] | None) -> None:
        self._tokenizer, self._vision = tokenizer, vision
        self._kept: OrderedDict[bytes, list[Piece]] = OrderedDict()
        self._lock = threading.Lock()

    def check(self) -> None:
        """Raises UserError if the model or this installation cannot take images."""
        if self._vision is None:
            raise UserError("the model takes no images: give its mmproj file with --mmproj")

        if not installed("PIL"):
            raise UserError("images need the package pillow: install it with: pip install pillow")

    def encode(self, text: str, images: Sequence[bytes], begins: bool = True) -> list[PromptPiece]:
        """The pieces of a prompt. begins: whether the text begins a prompt, or continues one. Raises UserError for
        images that cannot be used."""
        parts = self._parts(text, images)
        pieces: list[PromptPiece] = []
        for place, part in enumerate(parts):
            if isinstance(part, PreparedImage):
                pieces.append(part)
            elif place or not begins:
                pieces.append(self._tokenizer.encode(part, add_special=False))
            else:
                pieces.append(self._tokenizer.encode_prompt(part))
        return [piece for piece in pieces if piece != []]

    def prompt(self, text: str, images: Sequence[bytes]) -> Prompt:
        """A prompt of a text and images. These replace `PLACE` if it is there once for each, or precede the text."""
        if not images or text.count(PLACE) != len(images):
            return Prompt.of(self.encode(IMAGE * len(images) + text, images))
        return Prompt.of(self.encode(text.replace(PLACE, IMAGE), images))

    def _parts(self, text: str, images: Sequence[bytes]) -> list[Piece]:
        """Alternating texts and tiles. The first is a text, perhaps an empty one."""
        if not images:
            return [text]
        texts = (text if isinstance(text, Traced) else Traced.all_own(text)).split(IMAGE)
        if len(texts) != len(images) + 1:
            raise UserError("the prompt must have exactly one mark for each image: remove U+FDD1 from its texts")
        parts: list[Piece] = [texts[0]]
        for place, data in enumerate(images):
            prepared = self._prepared(data, "the image" if len(images) == 1 else f"image {place + 1}")
            own = [Traced.all_own(piece) if isinstance(piece, str) else piece for piece in prepared]
            for piece in (*own, texts[place + 1]):
                if isinstance(piece, str) and isinstance(parts[-1], str):
                    parts[-1] += piece
                else:
                    parts.append(piece)
        return parts

    def _prepared(self, data: bytes, where: str) -> list[Piece]:
        self.check()
        from mlc_amd.runtime.images.projectors import Preparation  # it needs Pillow

        key = blake2b(data, digest_size=16).digest()
        with self._lock:
            if (found := self._kept.get(key)) is not None:
                self._kept.move_to_end(key)
                return found
        assert self._vision is not None, "check() has found it"
        made = Preparation(self._vision).pieces(decode(data, where))
        with self._lock:
            self._kept[key] = made
            while len(self._kept) > 1 and sum(map(_bytes, self._kept.values())) > _KEPT:
                self._kept.popitem(last=False)
        return made


def _bytes(pieces: Sequence[Piece]) -> int:
    return sum(piece.pixels.nbytes for piece in pieces if isinstance(piece, PreparedImage))
