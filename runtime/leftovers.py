"""What must be undone however the process ends: temporary folders, child processes, a terminal that does not echo.

In: functions that undo these, each registered as long as it is needed. `undo_all` calls them; it is for code that ends
the process without unwinding the stack, such as a signal handler (tools/interrupts.py).
"""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count

_undo: dict[int, Callable[[], object]] = {}
_numbers = count()


def note(undo: Callable[[], object]) -> Callable[[], object]:
    """Registers `undo`, which may be called on any thread. The returned function unregisters it."""
    number = next(_numbers)
    _undo[number] = undo
    return partial(_undo.pop, number, None)


def undo_all() -> None:
    """Calls all registered functions, the last one first. Ignores their exceptions."""
    for undo in reversed(list(_undo.values())):
        with suppress(Exception):
            undo()
