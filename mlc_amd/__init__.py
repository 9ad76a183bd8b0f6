"""mlc-amd: compiles GGUF language models for AMD hardware and runs them.

    import mlc_amd

    engine = mlc_amd.load("model.gguf")             # compiled into the user's cache on first use
    print(engine.ask("What does os.path.join do?"))

Everything else is imported when it is first used: `import mlc_amd` alone loads neither TVM nor NumPy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlc_amd.runtime.engine.encoder import Encoder
    from mlc_amd.runtime.engine.engine import Engine
    from mlc_amd.runtime.engine.generation import ContextFull
    from mlc_amd.runtime.engine.scheduler import QueueFull
    from mlc_amd.runtime.errors import UserError
    from mlc_amd.runtime.sampling.settings import Sampling
    from mlc_amd.tools.api import compile, load

__version__ = "0.1.0"
__all__ = ["ContextFull", "Encoder", "Engine", "QueueFull", "Sampling", "UserError", "__version__", "compile", "load"]

_MODULES = {
    "ContextFull": "mlc_amd.runtime.engine.generation",
    "Encoder": "mlc_amd.runtime.engine.encoder",
    "Engine": "mlc_amd.runtime.engine.engine",
    "QueueFull": "mlc_amd.runtime.engine.scheduler",
    "Sampling": "mlc_amd.runtime.sampling.settings",
    "UserError": "mlc_amd.runtime.errors",
    "compile": "mlc_amd.tools.api",
    "load": "mlc_amd.tools.api",
}


def __getattr__(name: str) -> Any:
    import importlib

    if name not in _MODULES:
        raise AttributeError(f"module 'mlc_amd' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
