"""Makes tests/fixtures/encoders.npz: vectors and scores of the models of tests/support/encoders.py, by llama.cpp.

    python -m tests.dev.encoder_fixtures LLAMA_LOGITS [NAME..]

LLAMA_LOGITS: a program `MODEL.gguf OUT.f32 --embd POOLING TOKEN..` that writes what llama.cpp's embeddings API returns,
as float32. Vectors are kept as float16.
"""

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from mlc_amd.compiler.gguf.writer import write_gguf
from tests.support.encoders import MODELS, WITHOUT_ORACLE, texts, tiny

FIXTURE = Path(__file__).parents[1] / "fixtures" / "encoders.npz"


def main(program: str, names: list[str]) -> None:
    found = dict(np.load(FIXTURE)) if names else {}
    with TemporaryDirectory() as folder:
        path, out = Path(folder, "model.gguf"), Path(folder, "out.f32")
        for name in names or [name for name in MODELS if name not in WITHOUT_ORACLE]:
            model = tiny(name)
            write_gguf(model, path)
            assert model.config.encoder
            pooling, rows = model.config.encoder.pooling, []
            for ids in texts():
                command = [program, str(path), str(out), "--embd", pooling, *map(str, ids)]
                subprocess.run(command, check=True, capture_output=True)
                rows.append(np.fromfile(out, np.float32).reshape(len(ids) if pooling == "none" else 1, -1))
            kept = np.concatenate([one[-1:] for one in rows])  # of single tokens the last one's
            found[name] = kept if pooling == "rank" else kept.astype(np.float16)
            print(name, found[name].shape, flush=True)
    np.savez_compressed(FIXTURE, **found)  # pyright: ignore[reportArgumentType]


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
