"""Tiny image encoders: mmproj files with random weights, and what llama.cpp (v0.5.0, float32) makes of a picture with
them, tests/fixtures/vision.npz. Each has a part of what encoders can have."""

import itertools
import math
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np

from mlc_amd.compiler.gguf import synthetic
from mlc_amd.compiler.gguf.writer import write_gguf
from mlc_amd.runtime.engine import encoding

HIDDEN, HEADS, FF, LAYERS, COLUMNS = 48, 3, 80, 3, 64  # COLUMNS: of the decoder
# By projector: its metadata, pixels of the picture (width, height), which preprocessing leaves as they are.
ENCODERS: dict[str, tuple[dict[str, object], tuple[int, int]]] = {
    "gemma3": ({"image_size": 32, "patch_size": 4, "projector.scale_factor": 2}, (32, 32)),
    "qwen2.5vl_merger": ({"image_size": 560, "patch_size": 14, "n_wa_pattern": 2}, (168, 140)),
    "qwen3vl_merger": ({"image_size": 64, "patch_size": 8, "spatial_merge_size": 2}, (96, 48)),
    "mlp": ({"image_size": 28, "patch_size": 7}, (28, 28)),
}
# Of a decoder that takes their features
DECODER = {
    "embedding_length": COLUMNS, "attention.key_length": 32, "attention.value_length": 32, "rope.dimension_count": 32,
}  # fmt: skip
QUICK = ("qwen2.5vl_merger", "mlp")  # whose activation is not GELU


def write_pair(folder: Path) -> None:
    """A decoder and an encoder for it, in a new folder: model.gguf, mmproj.gguf."""
    folder.mkdir()
    write_gguf(synthetic("tiny-qwen2:f16", keys=DECODER), folder / "model.gguf")
    write(folder / "mmproj.gguf", "gemma3")


def write(path: Path, projector: str, dtype=np.float32, **changes: object) -> None:
    """dtype: of matrices; changes: of the metadata, "embedding_length" and the like; None leaves a key out."""
    random = np.random.default_rng(len(projector))
    own, _ = ENCODERS[projector]
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_string("clip.projector_type", projector)
    writer.add_bool("clip.use_gelu", projector not in QUICK)
    writer.add_bool("clip.use_silu", projector == "qwen2.5vl_merger")
    keys = {
        "embedding_length": HIDDEN, "block_count": LAYERS, "feed_forward_length": FF, "projection_dim": COLUMNS,
        "attention.head_count": HEADS, "attention.layer_norm_epsilon": 1e-6, "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }  # fmt: skip
    for key, value in (keys | own | changes).items():
        if isinstance(value, float):
            writer.add_float32(f"clip.vision.{key}", value)
        elif isinstance(value, list):
            writer.add_array(f"clip.vision.{key}", value)
        elif value is not None:
            writer.add_uint32(f"clip.vision.{key}", int(str(value)))

    def add(name: str, *shape: int, mean: float = 0.0, scale: float = 0.0) -> None:
        scale = scale or (1.2 / math.sqrt(math.prod(shape[1:])) if len(shape) > 1 else 0.1)
        values = mean + scale * random.standard_normal(shape)
        writer.add_tensor(name, values.astype(dtype if len(shape) > 1 else np.float32))

    def linear(name: str, rows: int, columns: int) -> None:
        add(f"{name}.weight", rows, columns)
        add(f"{name}.bias", rows)

    def norm(name: str, size: int, bias: bool = projector != "qwen2.5vl_merger") -> None:
        add(f"{name}.weight", size, mean=1.0)
        if bias:
            add(f"{name}.bias", size)

    size = int(str(own["patch_size"]))
    for suffix in ("", ".1") if "vl" in projector else ("",):
        add(f"v.patch_embd.weight{suffix}", HIDDEN, 3, size, size)
    if projector in ("gemma3", "qwen3vl_merger"):
        add("v.patch_embd.bias", HIDDEN)
    if projector != "qwen2.5vl_merger":
        places = (int(str(own["image_size"])) // size) ** 2
        add("v.position_embd.weight", places + (projector == "mlp"), HIDDEN, scale=0.4)
    if projector == "mlp":
        add("v.class_embd", HIDDEN, scale=0.5)
        norm("v.pre_ln", HIDDEN)
    for i in range(LAYERS):
        block = f"v.blk.{i}."
        norm(block + "ln1", HIDDEN)
        norm(block + "ln2", HIDDEN)
        if projector == "qwen3vl_merger":
            linear(block + "attn_qkv", 3 * HIDDEN, HIDDEN)
        else:
            for which in "qkv":
                linear(f"{block}attn_{which}", HIDDEN, HIDDEN)
        linear(block + "attn_out", HIDDEN, HIDDEN)
        if projector == "qwen2.5vl_merger":
            linear(block + "ffn_gate", FF, HIDDEN)
        linear(block + "ffn_up", FF, HIDDEN)
        linear(block + "ffn_down", HIDDEN, FF)
    if projector != "mlp":
        norm("v.post_ln", HIDDEN)
    if projector == "gemma3":
        add("mm.input_projection.weight", HIDDEN, COLUMNS)
        norm("mm.soft_emb_norm", HIDDEN, bias=False)
    else:
        joined = HIDDEN if projector == "mlp" else 4 * HIDDEN
        linear("mm.0", joined, joined)
        linear("mm.2", COLUMNS, joined)
    if projector == "qwen3vl_merger":
        norm("v.deepstack.1.norm", 4 * HIDDEN)
        linear("v.deepstack.1.fc1", 4 * HIDDEN, 4 * HIDDEN)
        linear("v.deepstack.1.fc2", COLUMNS, 4 * HIDDEN)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def picture(projector: str) -> np.ndarray:
    """uint8 [height, width, 3]: the one of the fixture."""
    width, height = ENCODERS[projector][1]
    return np.random.default_rng(7).integers(0, 256, (height, width, 3), np.uint8)


def pixels(projector: str) -> np.ndarray:
    """float32 [3, height, width], normalized."""
    return (picture(projector).astype(np.float32).transpose(2, 0, 1) / 255 - 0.5) / 0.5


def features(projector: str) -> np.ndarray:
    """float32 [tokens, columns], of llama.cpp."""
    return np.load(Path(__file__).parents[1] / "fixtures" / "vision.npz")[projector]


def one_piece_a_turn(monkeypatch) -> None:
    """By the clock of images' pieces, one takes as long as a step, so that a step follows each."""
    monkeypatch.setattr(encoding, "time", SimpleNamespace(perf_counter=itertools.count().__next__))
