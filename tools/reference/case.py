"""`Case`, a call of an operator, and `Result`, its result: the argument and the return values of all references."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mlc_amd.schedules.operators import Operator
from mlc_amd.schedules.operators.attention import SLOTS
from mlc_amd.schedules.operators.layouts import kind_of
from mlc_amd.tools.reference import activations, weights


@dataclass(frozen=True)
class Result:
    """value: of the given rows and columns of an output (None: of its first ones, as many as `value` has); of the whole
    output if rows is None."""

    value: np.ndarray
    rows: np.ndarray | None = None
    columns: np.ndarray | None = None


@dataclass(frozen=True)
class Case:
    """op: an Operator. arrays: the parameters of its kernel by name, before the call. layout: of weights and caches,
    "cpu" or "gpu". rows: the wanted rows: live rows or used slots (`wanted_rows` returns all). pick(n): the wanted ones
    of n columns. decoded: keeps decoded matrices between calls; None: they are not kept."""

    op: Any
    arrays: dict[str, np.ndarray]
    layout: str
    rows: np.ndarray
    pick: Callable[[int], np.ndarray] = np.arange
    decoded: dict | None = field(default=None, compare=False)

    @property
    def live(self) -> int:
        return live_rows(self.op, self.arrays)

    @property
    def single(self) -> int:
        """The number of single rows."""
        return min(int(self.arrays["state"][0]), self.live)

    def places(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(positions, slots) of these rows."""
        table = self.arrays["rows"][rows]
        return table[:, 0], np.clip(table[:, 1], 0, SLOTS - 1)

    def read(self, rows: np.ndarray) -> np.ndarray:
        """These rows of the activations that the operator reads."""
        layout = self.op.layout_read
        x = activations.read(layout, self.arrays, rows=rows)
        return x[:, : self.op.k] if kind_of(layout) == "lanes" else x

    def matrix(self, prefix: str, fmt: str, rows: np.ndarray) -> np.ndarray:
        """Rows of the packed matrix whose planes' names have this prefix, as numbers."""
        planes = {name.removeprefix(prefix): array for name, array in self.arrays.items() if name.startswith(prefix)}
        if self.decoded is None:
            return weights.rows_of(self.layout, fmt, planes, rows)
        first = next(iter(planes.values()))
        if (key := first.ctypes.data) not in self.decoded:
            count = first.shape[0] * (weights.TILE if self.layout == "cpu" else 1)
            self.decoded[key] = weights.rows_of(self.layout, fmt, planes, np.arange(count))
        return self.decoded[key][rows]


def live_rows(op: Operator, arrays: dict[str, np.ndarray]) -> int:
    """The number of live rows in a call with these parameters."""
    return min(int(arrays["state"][1]), op.m)


def rms(x: np.ndarray, eps: float) -> np.ndarray:
    x = x.astype(np.float64)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)
