"""Work on all cores for code generators, most of which is Python's: in forked copies of this process, which have the
kernels already.

In: a function and items. Out: its results, in the items' order.
"""

import ctypes
import os
import pickle
import selectors
import signal
import struct
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, NoReturn, TypeVar

from mlc_amd.runtime import leftovers

Item = TypeVar("Item")
Result = TypeVar("Result")
_PR_SET_PDEATHSIG = 1
_NUMBER, _SIZE = struct.Struct("H"), struct.Struct("Q")


def spread(
    work: Callable[[Item], Result], items: Sequence[Item], workers: int, done: Callable[[Item], object]
) -> list[Result]:
    """[work(item) for item in items], by up to `workers` processes; done(item) is called here after each. An exception
    of `work` ends all and is raised here."""
    if min(workers, len(items)) < 2:
        return [_finished(work(item), item, done) for item in items]
    results: dict[int, Result] = {}
    with ExitStack() as held, selectors.DefaultSelector() as selector:
        numbers, write = os.pipe()  # of the items: whoever is free takes the next
        os.write(write, b"".join(map(_NUMBER.pack, range(len(items)))))
        os.close(write)
        for _ in range(min(workers, len(items))):
            selector.register(_fork(work, items, numbers, held), selectors.EVENT_READ, bytearray())
        os.close(numbers)
        while selector.get_map():
            for key, _ in selector.select():
                _receive(key, selector, results, lambda number: done(items[number]))
    if len(results) < len(items):
        raise RuntimeError("a process that compiled kernels was ended")
    return [results[number] for number in range(len(items))]


def _finished(result: Result, item: Item, done: Callable[[Item], object]) -> Result:
    done(item)
    return result


def _receive(key: selectors.SelectorKey, selector, results: dict[int, Any], done: Callable[[int], object]) -> None:
    """Takes what a process wrote: (number, result), or (number, exception, True)."""
    received = os.read(key.fd, 1 << 20)
    if not received:
        selector.unregister(key.fd)
        return
    key.data.extend(received)
    while len(key.data) >= _SIZE.size and len(key.data) >= (end := _SIZE.size + _SIZE.unpack_from(key.data)[0]):
        number, result, *failed = pickle.loads(key.data[_SIZE.size : end])
        del key.data[:end]
        if failed:
            raise result
        results[number] = result
        done(number)


def _fork(work: Callable, items: Sequence, numbers: int, held: ExitStack) -> int:
    """A process, which `held` ends; returns the file that it writes to."""
    read, write = os.pipe()
    parent, child = os.getpid(), os.fork()
    if not child:
        _run(work, items, numbers, write, parent)
    os.close(write)
    held.callback(os.close, read)
    held.callback(os.waitpid, child, 0)
    held.callback(_kill, child)
    held.callback(leftovers.note(partial(_kill, child)))
    return read


def _kill(child: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)


def _run(work: Callable, items: Sequence, numbers: int, write: int, parent: int) -> NoReturn:
    """The forked process. It ends with the thread that forked it, and does nothing of what that one does at its end."""
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the parent's handlers are for the parent
            signal.signal(number, signal.SIG_IGN if number == signal.SIGINT else signal.SIG_DFL)
        while os.getppid() == parent and (taken := os.read(numbers, _NUMBER.size)):
            (number,) = _NUMBER.unpack(taken)
            try:
                answer = pickle.dumps((number, work(items[number])))
            except Exception as error:
                answer = pickle.dumps((number, error, True))
            answer = _SIZE.pack(len(answer)) + answer
            while answer:
                answer = answer[os.write(write, answer) :]
    finally:
        os._exit(0)
