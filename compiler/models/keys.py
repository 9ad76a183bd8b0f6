"""Typed access to the metadata of a GGUF file.

In: metadata as plain Python values, names of tensors. Out: `Keys`. A value that is missing, impossible or of another
type raises a `UserError` with the name of its key.
"""

import math
from collections.abc import Collection, Mapping
from copy import copy

from mlc_amd.runtime.errors import UserError, shorten


class Keys:
    """Typed access to the metadata of a file, and to the names of its tensors. prefix: the architecture, which is put
    in front of every key except `general.*`. A value that is missing, impossible or of another type raises a UserError
    of one line, with the file's path in front.

    A key may have one value, or a list with a value for each layer. The `Keys` of a layer (`at`) return the value of
    this layer; the `Keys` of the file return the value if it is the same for all layers."""

    def __init__(
        self, metadata: dict[str, object], tensors: Collection[str], path: str, prefix: str = "", pooling: str = ""
    ):
        """tensors: names, or {name: shape}. pooling: instead of the file's; "" for the file's."""
        self.metadata, self.tensors, self.path, self.prefix = metadata, tensors, path, prefix
        self.pooling = pooling
        self.layer: int | None = None

    def at(self, layer: int) -> "Keys":
        """The `Keys` of a layer."""
        found = copy(self)
        found.layer = layer
        return found

    def owns(self, name: str) -> bool:
        """Whether the layer has a tensor of this name (within the layer). For the file's `Keys`: the first layer."""
        return f"blk.{self.layer or 0}.{name}" in self.tensors

    def full(self, key: str) -> str:
        return key if key.startswith(("general.", "tokenizer.")) else f"{self.prefix}.{key}"

    def has(self, key: str) -> bool:
        """Whether the metadata has the key."""
        return self.full(key) in self.metadata

    def rows(self, name: str) -> int:
        """The number of rows of a matrix; 0 if the shapes of tensors are not known."""
        shapes = self.tensors if isinstance(self.tensors, Mapping) else {}
        return shapes.get(name, (0,))[0]

    def error(self, message: str) -> UserError:
        return UserError(f"{self.path}: {message}")

    def _get(self, key: str, default: object) -> object:
        value = self.metadata.get(self.full(key), default)
        if value is None:
            raise self.error(f"metadata key {self.full(key)} is missing; convert the model again")
        return value

    def _one(self, key: str, default: object) -> object:
        """The value of a key; if it is a list, the value of the layer."""
        value = self._get(key, default)
        if not isinstance(value, list) or not value:
            return value
        if self.layer is not None:
            layers = self.metadata.get(self.full("block_count"))
            self._check_length(key, value, layers if isinstance(layers, int) else 0)
            return value[self.layer]
        if any(entry != value[0] for entry in value):
            raise self.error(f"{self.full(key)} differs between layers; only models with equal layers are supported")
        return value[0]

    def _check_length(self, key: str, value: list, layers: int) -> None:
        if len(value) != layers:
            raise self.error(
                f"{self.full(key)} has {len(value)} entries, the model has {layers} layers; convert the model again"
            )

    def _wrong(self, key: str, value: object, expected: str) -> UserError:
        what = f"metadata key {self.full(key)} is {shorten(value)}, expected {expected}"
        return self.error(f"{what}; convert the model again")

    def string(self, key: str, default: str | None = None) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, value, "a string")
        return value

    def integer(self, key: str, default: int | None = None, minimum: int = 1, maximum: int = (1 << 31) - 1) -> int:
        """An integer. Raises UserError unless minimum <= value <= maximum."""
        return self._checked(key, self._one(key, default), minimum, maximum)

    def integers(self, key: str, layers: int, default: int | None = None, minimum: int = 1) -> list[int]:
        """One integer for each layer: the list in the file, or its one number for all layers."""
        value = self._get(key, default)
        if not isinstance(value, list):
            return [self._checked(key, value, minimum)] * layers
        self._check_length(key, value, layers)
        return [self._checked(key, entry, minimum) for entry in value]

    def numbers(self, key: str) -> list[int]:
        """A list of integers >= 0, of any length and size."""
        value = self._get(key, None)
        if not isinstance(value, list) or not all(isinstance(one, int) and one >= 0 for one in value):
            raise self._wrong(key, value, "a list of integers >= 0")
        return value

    def flags(self, key: str, layers: int) -> list[bool]:
        """One flag for each layer. The list in the file may have flags, or 0 and 1."""
        value = self._get(key, None)
        if not isinstance(value, list) or len(value) != layers or not all(flag in (0, 1) for flag in value):
            raise self._wrong(key, value, f"a list of {layers} flags")
        return [bool(flag) for flag in value]

    def flag(self, key: str, default: bool) -> bool:
        value = self._one(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def _checked(self, key: str, value: object, minimum: int, maximum: int = (1 << 31) - 1) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= maximum:
            limit = f" and <= {maximum}" if isinstance(value, int) and value > maximum and maximum < 1 << 30 else ""
            raise self._wrong(key, value, f"an integer >= {minimum}{limit}")
        return value

    def number(self, key: str, default: float | None = None, minimum: float | None = None) -> float:
        """A finite number, above 0 unless `minimum` is given."""
        value = self._one(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            valid = False
        else:
            valid = value > 0 if minimum is None else value >= minimum
        if not valid:
            raise self._wrong(key, value, "a number above 0" if minimum is None else f"a number >= {minimum:g}")
        return float(value)  # type: ignore[arg-type]  # checked above
