"""mlc-amd: compiles GGUF language models for AMD hardware and runs them.

    import mlc_amd

    engine = mlc_amd.load("model.gguf")             # compiled into the user's cache on first use
    for text in engine.chat("What does os.path.join do?"):
        print(text, end="", flush=True)

Everything else is imported when it is first used: `import mlc_amd` alone loads neither TVM nor NumPy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import os
    from pathlib import Path

    from mlc_amd.runtime.cache.kv_types import KvType
    from mlc_amd.runtime.engine.engine import Engine
    from mlc_amd.runtime.engine.generation import ContextFull
    from mlc_amd.runtime.engine.limits import QueueFull
    from mlc_amd.runtime.errors import UserError
    from mlc_amd.runtime.sampling.settings import Sampling

__version__ = "0.1.0"
__all__ = ["ContextFull", "Engine", "QueueFull", "Sampling", "UserError", "__version__", "compile", "load"]

_MODULES = {
    "ContextFull": "mlc_amd.runtime.engine.generation",
    "Engine": "mlc_amd.runtime.engine.engine",
    "QueueFull": "mlc_amd.runtime.engine.limits",
    "Sampling": "mlc_amd.runtime.sampling.settings",
    "UserError": "mlc_amd.runtime.errors",
}


def __getattr__(name: str) -> Any:
    import importlib

    if name not in _MODULES:
        raise AttributeError(f"module 'mlc_amd' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def load(
    model: str | os.PathLike[str] | None = None,
    *,
    target: Literal["auto", "cpu", "rocm", "vulkan"] = "auto",
    arch: str = "native",
    ctx: int | None = None,
    tuned: Literal["none", "shipped", "user", "auto"] = "auto",
    device: str | None = None,
    threads: int | None = None,
    verify: bool = False,
    n_cpu_moe: int = 0,
    kv_tokens: int | None = None,
    kv_memory: int | str | None = None,
    kv_type: KvType | None = None,
    draft: str | None = None,
) -> Engine:
    """Loads an artifact, or a GGUF file, which is compiled into the user's cache on first use.

    Args:
        model: an artifact folder, a GGUF file, or the name of a model of huggingface.co, "OWNER/REPO:QUANT", which is
            downloaded on first use; None: the bundled demo model.
        target: what a GGUF file is compiled for; "auto": rocm if AMD's HIP runtime works, else vulkan on a GPU, else
            cpu.
        arch: the CPU, GPU or Vulkan profile that a GGUF file is compiled for; "native": this machine's.
        ctx: tokens that the KV cache of a GGUF file holds; None: the model's maximum, at most 4096.
        tuned: which tuned plans a GGUF file is compiled with.
        device: which GPU runs target vulkan: its number in `mlc-amd doctor` or a part of its name.
        threads: threads of target cpu; None: all cores.
        verify: verify the checksum of the weights, which reads all of them.
        n_cpu_moe: of a GPU with its own memory, how many first layers' experts stay in host memory.
        kv_tokens: tokens that the KV cache holds, of all sequences together; None: one sequence of full length.
        kv_memory: instead, how much memory the KV cache takes: bytes, a size such as "4G", or "auto": what the device
            has left, half of what is available of the host's.
        kv_type: type of a GGUF file's KV cache; None: "f16". "q8_0" takes half of the memory.
        draft: where guesses of the next tokens come from, which steps verify several at a time: a smaller model with
            the same vocabulary, given as `model` is, "lookup": the text so far, or "mtp": the model's own layer for
            that, if it has one. Answers are the same without.

    Raises:
        UserError: the model cannot be compiled or run here; the message says why. Where it names a flag of the
            commands, such as --n-cpu-moe, it means the argument of that name.
    """
    from mlc_amd.tools.hub import models

    name = None if model is None else str(model)
    return models.load_engine(
        name,
        target=target,
        arch=arch,
        ctx=ctx,
        tuned=tuned,
        device=device,
        threads=threads,
        verify=verify,
        n_cpu_moe=n_cpu_moe,
        kv_tokens=kv_tokens,
        kv_memory=kv_memory,
        kv_type=kv_type,
        draft=draft,
    )


def compile(
    model: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    target: Literal["auto", "cpu", "rocm", "vulkan"] = "auto",
    arch: str = "native",
    ctx: int | None = None,
    tuned: Literal["none", "shipped", "user", "auto"] = "auto",
    kv_type: KvType | None = None,
) -> Path:
    """Compiles a GGUF file into the artifact folder `output`, and returns its path; for the arguments see `load`.

    An artifact already there is replaced; no other folder is.

    Raises:
        UserError: the model cannot be compiled; the message says why.
    """
    from mlc_amd.tools.hub.models import compile_artifact

    settings = {"target": target, "arch": arch, "ctx": ctx, "tuned": tuned, "kv_type": kv_type}
    return compile_artifact(str(model), str(output), **settings).path
