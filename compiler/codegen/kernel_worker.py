"""A process that compiles kernels for a GPU; `kernel_workers.py` starts it.

In, a request: a compiler, an arch, and operators with their plans. Out: {"module": compiler(kernels, arch)} or
{"error": message}.
"""

from mlc_amd.compiler.codegen import rocm, spirv  # noqa: F401 (the compilers that requests name, before there are any)
from mlc_amd.compiler.codegen.kernel_workers import packed, unpacked
from mlc_amd.runtime.measure.child import serve
from mlc_amd.schedules.gpu import registry


def _handle(request: dict, answer) -> None:
    compiler, arch, group = unpacked(request["group"])
    try:
        kernels = {
            name: registry.builders[type(workload)](workload, arch, name, plan) for name, workload, plan in group
        }
        answer({"module": packed(compiler(kernels, arch))})
    except ValueError as error:
        answer({"error": str(error)})


if __name__ == "__main__":
    serve(_handle)
