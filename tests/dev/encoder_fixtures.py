"""Makes tests/fixtures/encoders.npz: vectors and scores of the models of tests/support/encoders.py, by llama.cpp.

    python -m tests.dev.encoder_fixtures LLAMA_LOGITS [NAME..]

LLAMA_LOGITS: a program `MODEL.gguf OUT.f32 --embd POOLING TOKEN..` that writes what llama.cpp's embeddings API returns,
as float32. Vectors are kept as float16. NAME: of float32 weights; NAME-q8_0: of the model in Q8_0, with its weights as
float32; NAME-q8_0-error: how far llama.cpp is from that with the weights as they are (`relative_error`).
"""

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from mlc_amd.compiler.gguf import GGUFModel
from mlc_amd.compiler.gguf.writer import write_gguf
from tests.support.encoders import MODELS, WITHOUT_ORACLE, in_float32, relative_error, texts, tiny

FIXTURE = Path(__file__).parents[1] / "fixtures" / "encoders.npz"


def computed(program: str, model: GGUFModel) -> np.ndarray:
    """Of each text the vector or the score, of single tokens the last one's: float32 [texts, columns]."""
    assert model.config.encoder
    pooling, rows = model.config.encoder.pooling, []
    with TemporaryDirectory() as folder:
        path, out = Path(folder, "model.gguf"), Path(folder, "out.f32")
        write_gguf(model, path)
        for ids in texts():
            command = [program, str(path), str(out), "--embd", pooling, *map(str, ids)]
            subprocess.run(command, check=True, capture_output=True)
            rows.append(np.fromfile(out, np.float32).reshape(len(ids) if pooling == "none" else 1, -1)[-1])
    return np.stack(rows)


def main(program: str, names: list[str]) -> None:
    found = dict(np.load(FIXTURE)) if names else {}
    for name in names or [name for name in MODELS if name not in WITHOUT_ORACLE]:
        quantized = tiny(name, "q8_0")
        exact, theirs = computed(program, in_float32(quantized)), computed(program, quantized)
        found[f"{name}-q8_0-error"] = np.float32(relative_error(theirs, exact))
        for key, rows in ((name, computed(program, tiny(name))), (f"{name}-q8_0", exact)):
            found[key] = rows if rows.shape[1] == 1 else rows.astype(np.float16)
        print(name, found[name].shape, found[f"{name}-q8_0-error"], flush=True)
    np.savez_compressed(FIXTURE, **found)  # pyright: ignore[reportArgumentType]


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
