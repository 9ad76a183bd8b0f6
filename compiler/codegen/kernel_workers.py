"""The processes that compile a GPU's kernels: TVM's passes hold Python's lock for much of their time, and LLVM's
messages can only be held back for a whole process.

In: groups of operators with their plans, of which a process builds the kernels itself (as text, TensorIR would take it
longer to read). Out: the module of each group.
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
MOST = 8  # processes: each has some 300 MB of its own, and with more of them most would import TVM for a kernel or two
TIMEOUT = 600.0  # seconds of one group


class Kernel(NamedTuple):
    """plan: None for that of the kernel's rule."""

    name: str
    workload: Operator
    plan: Any


class Workers(Closing):
    """What compiles may use `count` cores: threads, or as many processes up to MOST, this one among them. The others
    start with the first request, or before it (`start`)."""

    def __init__(self, count: int):
        self.count, others = count, min(count, MOST) - 1
        self._others = Children(MODULE, others) if others > 0 else None

    def start(self) -> None:
        """The other processes import TVM while this one does something else."""
        if self._others:
            self._others.start()

    def compile(self, compiler: Callable, arch: Any, group: list[Kernel]) -> Future | None:
        """`result` below returns compiler(kernels, arch) for the group's kernels. None if there are no other
        processes."""
        if not self._others:
            return None
        return self._others.ask({"group": packed((compiler, arch, group))}, TIMEOUT)

    def close(self) -> None:
        if self._others:
            self._others.close()


ALONE = Workers(1)


def result(future: Future) -> Any:
    """That of `Workers.compile`. ValueError as of the compiler; RuntimeError if its process died."""
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
