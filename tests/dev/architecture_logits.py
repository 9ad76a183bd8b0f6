"""Logits by llama.cpp of tiny models (tests/support/architectures.py) for tests/fixtures/architectures_llamacpp.npz.

    python -m tests.dev.architecture_logits LLAMA_LOGITS NAME...

LLAMA_LOGITS: as of llamacpp_models.py. NAME: of LLAMACPP there; what the fixture has of others stays.
"""

import sys
import tempfile
from pathlib import Path

import gguf
import numpy as np

from mlc_amd.compiler.gguf import GGUFModel
from mlc_amd.compiler.gguf.tensor import Tensor
from mlc_amd.compiler.gguf.writer import write_gguf
from mlc_amd.compiler.models.tensors import EXPERT_TABLE
from tests.dev.llamacpp_models import theirs
from tests.support import architectures

FIXTURE = Path(__file__).parents[1] / "fixtures" / "architectures_llamacpp.npz"


def float32(tensor: Tensor) -> Tensor:
    """The same numbers, one by one; weights of convolutions as Kimi's and Ling's files have them."""
    shape = tensor.shape
    if ".ssm_conv1d_" in tensor.name:
        shape = shape[0], 1, shape[1]

    def fetch(start: int, stop: int) -> np.ndarray:
        kind = getattr(gguf.GGMLQuantizationType, tensor.format.upper())
        return gguf.quants.dequantize(tensor.blocks(start, stop), kind).astype(np.float32).view(np.uint8)

    return Tensor(tensor.name, "f32", shape, fetch)


def integers(path: Path) -> None:
    """Makes numbers of experts in the file integers, which llama.cpp takes only."""
    for tensor in gguf.GGUFReader(path, "r+").tensors:
        if tensor.name.endswith(EXPERT_TABLE):
            tensor.data.view(np.int32)[:] = tensor.data
            tensor.field.parts[4][0] = gguf.GGMLQuantizationType.I32


def logits(model: GGUFModel, program: str) -> np.ndarray:
    """float32 [positions, vocab], after the tokens at `positions` of `ids`."""
    exact = architectures.exact()
    model.stored = {name: float32(tensor) for name, tensor in model.stored.items()}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        write_gguf(model, path)
        integers(path)
        return theirs(path, program, exact["ids"])[exact["positions"]]


def main() -> None:
    program, *names = sys.argv[1:]
    found = dict(np.load(FIXTURE))
    for name in names:
        found[name] = logits(architectures.tiny(name), program)
        print(f"{name:16} {np.abs(found[name]).max():.3f}", flush=True)
        np.savez_compressed(FIXTURE, **{name: found[name] for name in sorted(found)})  # pyright: ignore[reportArgumentType]


if __name__ == "__main__":
    main()
