"""Compiles groups of kernels to AMD code objects in processes of their own: TVM's passes hold Python's lock for much of
their time, and LLVM's messages can only be held back for a whole process.

In: kernels as operators with their plans, which a process builds itself (as text, TensorIR would take it longer to
read). Out: the `HsacoModule` of each group. Run as a program, this module is such a process.
"""

import base64
import pickle
from concurrent.futures import Future
from typing import Any, NamedTuple

from mlc_amd.compiler.codegen.rocm import HsacoModule, compile_hsaco
from mlc_amd.runtime.closing import Closing
from mlc_amd.runtime.measure.child import ChildDied, Children, serve
from mlc_amd.schedules.gpu import registry
from mlc_amd.schedules.gpu.base.arch import resolve
from mlc_amd.schedules.operators import Operator

MODULE = "mlc_amd.compiler.codegen.hsaco_worker"
TIMEOUT = 600.0  # seconds of one group


class Kernel(NamedTuple):
    """plan: None for that of the kernel's rule."""

    name: str
    workload: Operator
    plan: Any


class Workers(Closing):
    """As many processes for one arch. A context manager."""

    def __init__(self, arch: str, count: int):
        self.arch, self._children = arch, Children(MODULE, count)

    def compile(self, group: list[Kernel]) -> Future:
        """`result` below returns the group's `HsacoModule`."""
        return self._children.ask({"arch": self.arch, "kernels": _packed(group)}, TIMEOUT)

    def close(self) -> None:
        self._children.close()


def result(future: Future) -> HsacoModule:
    """That of `Workers.compile`. ValueError as of `compile_hsaco`; RuntimeError if its process died."""
    try:
        answer = future.result()
    except ChildDied as error:
        raise RuntimeError(f"compiling kernels: {error}") from error
    if "error" in answer:
        raise ValueError(answer["error"])
    return _unpacked(answer["module"])


def _packed(value: Any) -> str:
    return base64.b64encode(pickle.dumps(value)).decode()


def _unpacked(text: str) -> Any:
    return pickle.loads(base64.b64decode(text))


def _handle(request: dict, answer) -> None:
    arch = resolve(request["arch"])
    try:
        kernels = {
            name: registry.builders[type(workload)](workload, arch, name, plan)
            for name, workload, plan in _unpacked(request["kernels"])
        }
        answer({"module": _packed(compile_hsaco(kernels, arch))})
    except ValueError as error:
        answer({"error": str(error)})


if __name__ == "__main__":
    serve(_handle)
