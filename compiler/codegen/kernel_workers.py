"""Processes that compile the kernels of a GPU. Threads would not do: TVM's passes hold Python's lock for much of their
time, and LLVM's messages can only be held back for a whole process.

In: groups of operators with their plans. A process builds the kernels of its group itself, because reading TensorIR as
text would take longer. Out: the module of each group.
"""

import base64
import pickle
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

from mlc_amd.runtime.closing import Closing
from mlc_amd.runtime.measure.child import ChildDied, Children
from mlc_amd.schedules.operators import Operator

MODULE = "mlc_amd.compiler.codegen.kernel_worker"
MOST = 8  # processes; each takes about 300 MB, and with more of them most would import TVM for one or two kernels
TIMEOUT = 600.0  # seconds for one group


class Kernel(NamedTuple):
    """A kernel to compile. plan: None for the plan of the kernel's rule."""

    name: str
    workload: Operator
    plan: Any


class Workers(Closing):
    """The cores that compiling may use. count: threads, or processes up to MOST; this process is one of them. The other
    processes start with the first request, or earlier by `start`."""

    def __init__(self, count: int):
        self.count, others = count, min(count, MOST) - 1
        self._others = Children(MODULE, others) if others > 0 else None

    def start(self) -> None:
        """Starts the other processes, so that they import TVM while this process does something else."""
        if self._others:
            self._others.start()

    def compile(self, compiler: Callable, arch: Any, group: list[Kernel]) -> Future | None:
        """Asks another process to build and compile a group of kernels. `result` returns compiler(kernels, arch) from
        the future. Returns None if there are no other processes."""
        if not self._others:
            return None
        return self._others.ask({"group": packed((compiler, arch, group))}, TIMEOUT)

    def close(self) -> None:
        if self._others:
            self._others.close()


ALONE = Workers(1)


def result(future: Future) -> Any:
    """The result of `Workers.compile`. Raises the compiler's ValueError, or RuntimeError if the process died."""
    try:
        answer = future.result()
    except ChildDied as error:
        raise RuntimeError(f"compiling kernels: {error}") from error
    if "error" in answer:
        raise ValueError(answer["error"])
    return unpacked(answer["module"])


def packed(value: Any) -> str:
    return base64.b64encode(pickle.dumps(value)).decode()


def unpacked(text: str) -> Any:
    return pickle.loads(base64.b64decode(text))
