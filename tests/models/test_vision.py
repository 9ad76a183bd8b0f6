"""Image encoders end to end: features of a picture against llama.cpp's, alone and packed with others; files that cannot
be compiled."""

import math
import os
from pathlib import Path

import gguf
import numpy as np
import pytest
import vision_models
import vulkan_harness
from few_functions import few_functions
from samples import sample

from mlc_amd.compiler.gguf import synthetic
from mlc_amd.compiler.gguf.mmproj import VisionFile
from mlc_amd.compiler.pipeline import compile_model
from mlc_amd.runtime.artifact.artifact import Artifact
from mlc_amd.runtime.devices.opening import open_device
from mlc_amd.runtime.engine.engine import Engine
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.images.encoder import ImageEncoder
from mlc_amd.runtime.images.prepared import PreparedImage
from mlc_amd.runtime.images.rows import ImagePart, Prompt
from mlc_amd.runtime.options import CompileOptions


def compiled(folder: Path, mmproj: Path, target: str = "cpu", arch: str = "native") -> Artifact:
    model = synthetic("tiny-qwen2:f16", keys=vision_models.DECODER)
    model.add_vision(VisionFile(mmproj))
    compile_model(model, folder, CompileOptions(target=target, arch=arch, ctx=64))
    return Artifact.open(folder)


def prepared(pixels: np.ndarray, rows: int) -> PreparedImage:
    return PreparedImage.of(pixels, rows, (1, rows), "")


def error_of(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("projector", sample(vision_models.ENCODERS, ["qwen2.5vl_merger", "qwen3vl_merger", "mlp"]))
def test_features_are_those_of_llama_cpp(projector, tmp_path):
    vision_models.write(tmp_path / "mmproj.gguf", projector)
    artifact = compiled(tmp_path / "model", tmp_path / "mmproj.gguf")
    expected, pixels = vision_models.features(projector), vision_models.pixels(projector)
    image, other = prepared(pixels, len(expected)), prepared(pixels[:, ::-1].copy(), len(expected))
    device = open_device(artifact)
    try:
        encoder = ImageEncoder(artifact, device)
        (alone,) = encoder.encode([image])
        before, packed, _ = encoder.encode([other, image, other])
    finally:
        device.close()
    assert alone.shape == expected.shape
    assert error_of(alone, expected) < 1e-5
    assert error_of(packed, expected) < 1e-5
    assert error_of(before, expected) > 0.1  # the other picture's


@pytest.mark.full  # test_features_of_16_bits runs such a device in every run
def test_features_of_a_vulkan_device(tmp_path):
    vulkan_harness.gpu()
    vision_models.write(tmp_path / "mmproj.gguf", "qwen2.5vl_merger")
    with few_functions():
        artifact = compiled(tmp_path / "model", tmp_path / "mmproj.gguf", "vulkan", "lavapipe")
    expected = vision_models.features("qwen2.5vl_merger")
    image = prepared(vision_models.pixels("qwen2.5vl_merger"), len(expected))
    device = open_device(artifact)
    try:
        (found,) = ImageEncoder(artifact, device).encode([image])
    finally:
        device.close()
    assert error_of(found, expected) < 1e-5


def test_features_of_16_bits(tmp_path):
    """A GPU hands over those of an encoder whose matrices are float16 with as many bits, and its decoder takes them."""
    vulkan_harness.gpu()
    vision_models.write(tmp_path / "mmproj.gguf", "qwen3vl_merger", np.float16)
    expected, rows = vision_models.pixels("qwen3vl_merger"), 18
    image, found, logits = PreparedImage.of(expected, rows, (3, 6), ""), {}, {}
    for target, arch in (("cpu", "native"), ("vulkan", "lavapipe")):
        with few_functions():
            artifact = compiled(tmp_path / target, tmp_path / "mmproj.gguf", target, arch)
        artifact.close()
        with Engine.load(tmp_path / target) as engine:
            logits[target] = engine.prefill(Prompt.of([[5, 9], image, [7]])).copy()
            entry = engine.artifact.manifest["io"]["features"]
            found[target] = np.empty((rows, entry["shape"][1]), entry["dtype"])
            engine.features.put([ImagePart(0, image, 0, rows)], 0, found[target])
    assert found["cpu"].dtype == np.float32 and found["vulkan"].dtype == np.float16
    assert error_of(found["vulkan"], found["cpu"]) < 4e-4
    assert error_of(logits["vulkan"], logits["cpu"]) < 1e-3


def test_an_image_that_does_not_fit_is_refused(tmp_path):
    vision_models.write(tmp_path / "mmproj.gguf", "qwen3vl_merger")
    artifact = compiled(tmp_path / "model", tmp_path / "mmproj.gguf")
    device = open_device(artifact)
    try:
        encoder = ImageEncoder(artifact, device)
        with pytest.raises(UserError, match="squares of 16"):
            encoder.encode([prepared(np.zeros((3, 24, 32), np.float32), 2)])
        with pytest.raises(UserError, match="larger --ctx"):
            encoder.encode([prepared(np.zeros((3, 16, 16 * 2048), np.float32), 2048)])
        with pytest.raises(UserError, match="2 rows, but the prompt has 3"):
            encoder.encode([prepared(np.zeros((3, 16, 32), np.float32), 3)])
    finally:
        device.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"embedding_length": 96}, "do not match"),
        ({"embedding_length": None}, "embedding_length is missing"),
        ({"attention.head_count": 5}, "heads of 8, 16, 24"),
        ({"block_count": 2}, "is not part of the encoder"),
        ({"block_count": 4}, "v.blk.3.attn_q.weight is missing|v.blk.3.ln1.weight is missing"),
        ({"feed_forward_length": 96}, None),  # not needed: the tensors say it
        ({"image_size": 40}, "position_embd"),
        ({"projector.scale_factor": 17}, "scale_factor"),
        ({"image_mean": None}, "metadata key clip.vision.image_mean is missing"),
        ({"image_mean": [0.5] * 2}, "no valid sizes, mean and std"),
        ({"image_std": [0.0] * 3}, "no valid sizes, mean and std"),
        ({"image_std": [0.5] * 100}, "clip.vision.image_std is missing"),
        ({"image_std": [0.5, math.nan, 0.5]}, "clip.vision.image_std is nan"),
    ],
)
def test_metadata_that_does_not_fit(changes, message, tmp_path):
    path = tmp_path / "mmproj.gguf"
    vision_models.write(path, "gemma3", **changes)
    if message is None:
        VisionFile(path).close()
        return
    with pytest.raises(UserError, match=message) as caught:
        compiled(tmp_path / "model", path)
    assert str(path) in str(caught.value)


def test_an_encoder_of_another_model_is_refused(tmp_path):
    vision_models.write(tmp_path / "mmproj.gguf", "gemma3")
    model = synthetic("tiny:q4_0")  # 256 columns
    model.add_vision(VisionFile(tmp_path / "mmproj.gguf"))
    with pytest.raises(UserError, match="makes 64 columns, and the model takes 256"):
        compile_model(model, tmp_path / "model", CompileOptions(target="cpu", ctx=64))


@pytest.mark.parametrize(("key", "value", "message"), [
    ("clip.projector_type", "ldpv2", "projector 'ldpv2' is not supported; supported are gemma3"),
    ("general.architecture", "llama", "not an image encoder"),
])  # fmt: skip
def test_other_files_are_refused_by_name(key, value, message, tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "file.gguf", value if key == "general.architecture" else "clip")
    writer.add_string("clip.projector_type", value)
    writer.add_tensor("v.class_embd", np.zeros(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UserError, match=message):
        VisionFile(tmp_path / "file.gguf")
    assert not [name for name in os.listdir("/proc/self/fd") if _is(name, tmp_path / "file.gguf")]


def _is(descriptor: str, path: Path) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}") == str(path)
    except OSError:
        return False
