"""The functions of `import mlc_amd`: a model loaded, a model compiled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlc_amd.runtime.options import CompileRequest, LoadOptions, keywords
from mlc_amd.tools.hub import models

if TYPE_CHECKING:
    from pathlib import Path

    from mlc_amd.runtime.engine.encoder import Encoder
    from mlc_amd.runtime.engine.engine import Engine


@keywords(LoadOptions)
def load(options: LoadOptions) -> Engine | Encoder:
    """Loads an artifact, or a GGUF file, which is compiled into the user's cache on first use. An embedding or ranking
    model is an `Encoder`, any other one an `Engine`.

    Raises UserError if the model cannot be compiled or run here; the message says why. Where it names a flag of the
    commands, such as --n-cpu-moe, it means the argument of that name.
    """
    return models.load_any(options)


@keywords(CompileRequest)
def compile(options: CompileRequest) -> Path:
    """Compiles a GGUF file into an artifact, and returns its path.

    Raises UserError if the model cannot be compiled; the message says why.
    """
    return models.compile_artifact(str(options.model), str(options.output), options).path
