"""Writes tests/fixtures/images/references.json: what llama.cpp's preprocessing makes of pictures.

    python -m tests.dev.image_references CASES LLAMA_IMAGE [--raw PROGRAM]

CASES: a folder with a folder for each encoder, which has mmproj.gguf and text.gguf. LLAMA_IMAGE: a program around
llama.cpp's libmtmd, called with mmproj, text model, picture, output, prompt and `--pixels FILE`: it prints the chunks
of the prompt as JSON and writes the planar float32 pixels of all tiles. PROGRAM: links llama.cpp's mtmd-image.cpp,
for projectors without a case: KIND WIDTH HEIGHT RGB-FILE OUTPUT -> "columns rows count", and a line for each tile,
pixels interleaved.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import gguf
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from image_cases import REFERENCES, digest, picture

SIZES = [(200, 130), (90, 210), (640, 480), (1100, 700), (31, 300)]
KEYS = (
    "image_size", "patch_size", "image_mean", "image_std", "projector.scale_factor", "spatial_merge_size",
    "image_min_pixels", "image_max_pixels", "preproc_image_size", "preproc_min_tiles", "preproc_max_tiles",
    "image_grid_pinpoints",
)  # fmt: skip
MEAN = [float(np.float32(0.48145466) - np.float32(0.02) * np.float32(i)) for i in range(3)]
STD = [float(np.float32(0.26862954) + np.float32(0.01) * np.float32(i)) for i in range(3)]
# Kinds of PROGRAM: projector, size, further metadata.
RAW = {
    "step3vl": ("step3vl", 728, {}),
    "minicpm4": ("minicpmv4_6", 448, {}),
    "minicpm2": ("minicpmv4_6", 448, {"projector.scale_factor": 2}),
    "glimmer": ("muse-glimmer", 448, {}),
    "paddle": ("paddleocr", 448, {"image_min_pixels": 147384, "image_max_pixels": 2822400}),
}


def metadata_of(path: Path) -> dict:
    fields = {key: field.contents() for key, field in gguf.GGUFReader(path).fields.items()}
    name = fields.get("clip.vision.projector_type") or fields["clip.projector_type"]
    found = {f"clip.vision.{key}": fields.get(f"clip.vision.{key}") for key in KEYS}
    return {"projector": name, "metadata": {key: value for key, value in found.items() if value is not None}}


def chunks_of(folder: Path, program: str, size: tuple[int, int], work: Path) -> dict | None:
    picture(*size).save(work / "a.png")
    command = [program, folder / "mmproj.gguf", folder / "text.gguf", work / "a.png", work / "o", "A<__media__>B"]
    done = subprocess.run([*command, "--pixels", work / "p"], capture_output=True, text=True)
    if done.returncode:
        return None  # llama.cpp fails for some narrow pictures
    chunks, pixels, at = json.loads(done.stdout)["chunks"], np.fromfile(work / "p", np.float32), 0
    texts, tiles, plain = [], [], ""
    for chunk in chunks:
        if chunk["kind"] == "text":
            plain = chunk["text"].replace("<s>", "").replace("<|endoftext|>", "").strip(" ")
            continue
        texts.append(plain)
        plain = ""
        (width, height, _), *more = chunk["preprocessed"]
        assert not more
        tile = pixels[at : at + 3 * width * height].reshape(3, height, width)
        at += tile.size
        tiles.append({"size": [width, height], "rows": chunk["n_tokens"], "pixels": digest(tile)})
    return {"texts": [*texts, plain], "tiles": tiles}


def raw_tiles(program: str, kind: str, size: tuple[int, int], work: Path) -> dict:
    (work / "raw").write_bytes(np.asarray(picture(*size)).tobytes())
    command = [program, kind, *map(str, size), work / "raw", work / "p"]
    _, *lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    pixels, at, tiles = np.fromfile(work / "p", np.float32), 0, []
    for line in lines:
        width, height = map(int, line.split())
        tile = pixels[at : at + 3 * width * height].reshape(height, width, 3).transpose(2, 0, 1)
        at += tile.size
        tiles.append({"size": [width, height], "pixels": digest(tile)})
    return {"tiles": tiles}


def main(cases: str, program: str, raw: str = "") -> None:
    found: dict[str, dict] = {}
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        for folder in sorted(Path(cases).iterdir()):
            if not (folder / "mmproj.gguf").exists():
                continue
            made = {size: chunks_of(folder, program, size, work) for size in SIZES}
            pictures = {f"{w}x{h}": chunks for (w, h), chunks in made.items() if chunks}
            found[folder.name] = {"vision": metadata_of(folder / "mmproj.gguf"), "pictures": pictures}
            print(folder.name, len(pictures), flush=True)
        for kind, (projector, side, more) in RAW.items() if raw else ():
            values = {"image_size": side, "patch_size": 14, "image_mean": MEAN, "image_std": STD, **more}
            vision = {"projector": projector, "metadata": {f"clip.vision.{k}": v for k, v in values.items()}}
            pictures = {f"{w}x{h}": raw_tiles(raw, kind, (w, h), work) for w, h in SIZES}
            found[kind] = {"vision": vision, "pictures": pictures}
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(case)}" for name, case in found.items())
    REFERENCES.write_text("{\n" + lines + "\n}\n")


if __name__ == "__main__":
    arguments = [argument for argument in sys.argv[1:] if argument != "--raw"]
    main(*arguments)
