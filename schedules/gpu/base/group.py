"""Reductions and prefix sums over the threads of a workgroup. Each wave reduces its values; the results of waves are
exchanged through shared memory."""

import functools

from tvm.tirx.script import builder as T

from mlc_amd.schedules.gpu.base.device import barrier, maximum, wave_max, wave_min, wave_scan, wave_sum
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.registers import put
from mlc_amd.schedules.tir import Buffer, Expr

# {name: (reduction over a wave, operation on two words)}
REDUCTIONS = {
    "max": (wave_max, maximum), "most": (wave_max, T.max), "least": (wave_min, T.min),
    "sum": (wave_sum, lambda a, b: a + b),
}  # fmt: skip


class Group:
    """Reductions over a workgroup of `waves` waves. Each reduction has shared memory of its own, so it needs one
    barrier. If a loop repeats it, there must be another barrier in between."""

    def __init__(self, arch: Device, lane: Expr, wave: Expr, waves: int):
        self.arch, self.lane, self.wave, self.waves = arch, lane, wave, waves
        self.threads, self.tid = waves * arch.wave, T.Bind(wave * arch.wave + lane)

    def of_waves(self, *words: Expr) -> list[Buffer]:
        """For each word, which must be the same in all lanes of a wave: shared memory with the words of all waves."""
        parts = [T.alloc_buffer((self.waves,), str(x.ty), scope="shared") for x in words]
        with T.If(self.lane == 0), T.Then():
            for part, x in zip(parts, words, strict=True):
                put(part, x, self.wave)
        barrier()
        return parts

    def reduce(self, *words: tuple[Expr, str]) -> list[Expr]:
        """Reduces words over all threads. words: (word, key of REDUCTIONS)."""
        parts = self.of_waves(*(REDUCTIONS[name][0](self.arch, T.Bind(x)) for x, name in words))
        return [self.joined(part, name) for part, (_, name) in zip(parts, words, strict=True)]

    def joined(self, part: Buffer, name: str) -> Expr:
        """Reduces the words of all waves, in all threads: each lane reads some of the words, then the lanes of a wave
        reduce these. (If each thread read all words, there would be so much code that drivers take long to compile
        it.)"""
        of_wave, join = REDUCTIONS[name]
        zero = T.cast(T.int32(0), str(part.dtype))
        words = [
            T.Select(index < self.waves, word, zero) if name == "sum" else word for index, word in self._words(part)
        ]
        return of_wave(self.arch, T.Bind(functools.reduce(join, words)))

    def _words(self, part: Buffer) -> list[tuple[Expr, Expr]]:
        """[(index, word)] of the words of waves that this lane reads. Lanes without a word read the last one."""
        indices = [T.Bind(self.lane + first) for first in range(0, self.waves, self.arch.wave)]
        return [(i, T.Bind(part[T.min(i, T.int32(self.waves - 1))])) for i in indices]

    def scan(self, x: Expr) -> tuple[Expr, Expr]:
        """(sum of x over the threads before this one, sum of x over all threads). x: int32."""
        before, whole = wave_scan(self.arch, T.Bind(x), self.lane)
        waves_before, total = self._sums(whole)
        return T.Bind(before + waves_before), total

    def before_wave(self, x: Expr) -> Expr:
        """The sum of x, int32, over all threads of the waves before this thread's wave."""
        return self._sums(wave_sum(self.arch, T.Bind(x)))[0]

    def _sums(self, of_wave: Expr) -> tuple[Expr, Expr]:
        """(sum of the words of the waves before this one, sum of the words of all waves)."""
        if self.waves == 1:
            return T.int32(0), of_wave
        (part,) = self.of_waves(of_wave)

        def below(wave: Expr | int) -> Expr:
            words = [T.Select(index < wave, word, T.int32(0)) for index, word in self._words(part)]
            return wave_sum(self.arch, T.Bind(functools.reduce(lambda a, b: a + b, words)))

        return below(self.wave), below(self.waves)
