"""What a process must not leave, however it ends: temporary folders, child processes, a terminal that does not echo.

In: what removes each of them, noted as long as it exists. `undo_all` is for who ends the process without unwinding,
from a signal (tools/interrupts.py).
"""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count

_undo: dict[int, Callable[[], object]] = {}
_numbers = count()


def note(undo: Callable[[], object]) -> Callable[[], object]:
    """Keeps `undo`, which may be called on any thread, until the returned function is called."""
    number = next(_numbers)
    _undo[number] = undo
    return partial(_undo.pop, number, None)


def undo_all() -> None:
    """The last noted comes first."""
    for undo in reversed(list(_undo.values())):
        with suppress(Exception):
            undo()
