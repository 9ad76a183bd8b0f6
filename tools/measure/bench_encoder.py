"""What `mlc-amd bench` measures of an embedding or ranking model: texts and tokens per second, by the length of texts
and by their number in a call.

In: an `Encoder`. Out: results with the fields of bench_formats.py, and "texts_per_s".
"""

import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from mlc_amd.runtime.artifact.artifact import Artifact
from mlc_amd.runtime.engine.encoder import Encoder
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.options import LoadOptions
from mlc_amd.schedules.formats import parameters
from mlc_amd.tools.hub import models

_AWAKE = 0.3  # seconds that a GPU works before it is timed, as idle GPUs have lower clocks


def is_encoder(load: LoadOptions, synthetic: str | None) -> bool:
    """Whether the options' model is an encoder. Nothing is compiled."""
    path = models.source_path(load.model, synthetic)
    if path and models.is_artifact(path):
        return bool(Artifact.open(path).manifest["model"]["encoder"])
    with models.open_source(path, synthetic, pooling=load.pooling, override_kv=load.override_kv) as source:
        return source.config.encoder is not None


def described(artifact: Artifact, device) -> dict[str, object]:
    """The fields that are equal for all tests."""
    manifest = artifact.manifest
    return {
        "model_filename": str(artifact.path),
        "model_type": f"{manifest['name']} {manifest['quantization']}",
        "model_size": sum(entry["bytes"] for entry in manifest["formats"].values()),
        "model_n_params": parameters(manifest["formats"]),
        "backends": manifest["target"]["kind"].upper(),
        "arch": manifest["target"]["arch"],
        "n_threads": device.threads,
        "device_name": device.name,
    }


def timed(compute: Callable[[], object], device, repetitions: int) -> list[float]:
    """The seconds of each repetition. One uncounted repetition comes first; on a GPU, as many as raise its clocks."""
    begin = time.perf_counter()
    compute()
    while device.kind != "cpu" and time.perf_counter() - begin < _AWAKE:
        compute()
    seconds = []
    for _ in range(repetitions):
        begin = time.perf_counter()
        compute()
        seconds.append(time.perf_counter() - begin)
    return seconds


def result(tokens: int, count: int, test: str, seconds: Sequence[float]) -> dict[str, object]:
    """The fields of one test: `count` inputs of `tokens` tokens each in a call. seconds: of each repetition."""
    rates = [tokens * count / s for s in seconds]
    return {
        "n_prompt": tokens, "n_seqs": count, "test": test,
        "avg_ns": round(float(np.mean(seconds)) * 1e9), "samples_ns": [round(s * 1e9) for s in seconds],
        "avg_ts": float(np.mean(rates)), "stddev_ts": float(np.std(rates, ddof=1)) if len(rates) > 1 else 0.0,
    }  # fmt: skip


def measure(encoder: Encoder, lengths: Sequence[int], counts: Sequence[int], repetitions: int) -> Iterator[dict]:
    """A result for each length and each number of texts. Raises UserError for texts that are too long."""
    if max(lengths) > encoder.context:
        raise UserError(f"-p {max(lengths)}: this model takes texts of up to {encoder.context} tokens")
    rng, about = np.random.default_rng(0), described(encoder.artifact, encoder.device)
    for length in lengths:
        for count in counts:
            texts = [rng.integers(0, encoder.vocab, length, np.int32) for _ in range(count)]
            seconds = timed(lambda texts=texts: encoder.encode(texts), encoder.device, repetitions)
            yield (
                about
                | result(length, count, f"{count} x {length}", seconds)
                | {"texts_per_s": count / float(np.mean(seconds))}
            )
