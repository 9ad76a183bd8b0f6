"""Units of eight elements of the KV cache in registers: loads them as they are stored, and converts them to float32 or
float16 for products."""

from tvm.tirx.script import builder as T

from mlc_amd.schedules.gpu.attention import cache_codes
from mlc_amd.schedules.gpu.attention.cache import UNIT, KeyBlock, forms
from mlc_amd.schedules.gpu.base.device import halves
from mlc_amd.schedules.gpu.base.registers import at, local, put
from mlc_amd.schedules.operators.attention import Attention
from mlc_amd.schedules.tir import Buffer, Expr

WORDS = UNIT // 2  # words of a unit of float16


class Units:
    """Registers for `count` units of keys or values of an `Attention` layer, as they are stored in the cache. They are
    converted only when they are used, so that many loads can be in flight. kind: "key" or "value"."""

    def __init__(self, attention: Attention, count: int, kind: str):
        self.form, self.quantized = forms(attention)[kind == "value"], attention.quantized
        self.scales_of_unit = {"key": 1, "value": UNIT}[kind]
        self.size = self.form.words
        self.words = local(count * self.size, "uint32")
        self.scales: Buffer = local(count * self.scales_of_unit, "float16") if self.quantized else None
        self.shifts: Buffer = local(count, "uint32") if self.form.shared > 1 else None

    def load_key(self, n: Expr, block: KeyBlock, place: Expr, c: Expr) -> None:
        """Loads unit c of the key in a place of the page into registers number n."""
        self._put(n, block.key(place, c), block.key_scale(place, c) if self.quantized else None)

    def load_value(self, n: Expr, block: KeyBlock, i: Expr, column: Expr) -> None:
        """Loads unit i of a column of the values into registers number n."""
        self._put(n, block.value(i, column), block.value_scales(i, column) if self.quantized else None)
        if self.shifts is not None:
            put(self.shifts, block.value_shift(column), n)

    def _put(self, n: Expr, unit: Expr, scales: Expr | None) -> None:
        words = T.reinterpret("uint32" if self.size == 1 else f"uint32x{self.size}", unit)
        put(self.words, words, at(n * self.size, self.size))
        if scales is not None:
            put(self.scales, scales, at(n * self.scales_of_unit, self.scales_of_unit))

    def _codes(self, n: Expr) -> tuple[list[Expr], Expr, Expr]:
        """(words, scales, shift) of unit number n."""
        words = [T.Bind(self.words[n * self.size + w]) for w in range(self.size)]
        scales = T.Bind(self.scales[at(n * self.scales_of_unit, self.scales_of_unit)])
        return words, scales, self.shifts[n] if self.shifts is not None else None

    def reals(self, first: Expr, count: int) -> list[list[Expr]]:
        """The units from number `first` on as float32 registers: a list of eight for each."""
        if self.quantized:
            return [cache_codes.reals(self.form, *self._codes(first + i)) for i in range(count)]
        words = [[T.Bind(self.words[(first + i) * self.size + w]) for w in range(self.size)] for i in range(count)]
        return [[x for word in unit for x in halves(word)] for unit in words]

    def pairs(self, n: Expr) -> tuple[Buffer, Expr]:
        """(buffer, index of the first word) of unit number n as WORDS words of two float16 each."""
        if not self.quantized:
            return self.words, n * WORDS
        found = local(WORDS, "uint32")
        for i, pair in enumerate(cache_codes.halves(self.form, *self._codes(n))):
            put(found, pair, i)
        return found, 0
