"""Reads the metadata that make a model an encoder.

In: the `Keys` of a file. Out: an `EncoderConfig`. Raises a UserError that names what is not supported. Names of keys
and defaults are llama.cpp's (src/llama-model.cpp, build_pooling and build_dense_out of src/llama-graph.cpp).
"""

from collections.abc import Sequence

from mlc_amd.compiler.models.config import LayerConfig
from mlc_amd.compiler.models.encoders.config import EncoderConfig, HeadLayer
from mlc_amd.compiler.models.keys import Keys

POOLINGS = {0: "none", 1: "mean", 2: "cls", 3: "last", 4: "rank"}  # by pooling_type
UNSAID = (1 << 32) - 1  # pooling_type -1 (not given) as an unsigned number
HEADS = "cls.", "dense_"  # prefixes of the names of tensors after pooling


def read_encoder(keys: Keys, required: bool = False, **variant) -> EncoderConfig | None:
    """The configuration of an encoder. None if the file has no pooling and its attention is causal, unless `required`.

    `variant`: further fields of EncoderConfig; also act and rows: of the first layer of a ranking model's head (rows
    only counts if this is the only layer).
    """
    pooling, causal = keys.pooling, keys.flag("attention.causal", not required)
    if not pooling:
        number = keys.integer("pooling_type", 0, minimum=-1, maximum=UNSAID)
        number = 0 if number == UNSAID else number
        if number > 0 or not causal:
            pooling = POOLINGS.get(max(number, 0), "")
            if not pooling:
                raise keys.error(
                    f"pooling type {number} is not supported; supported are {', '.join(POOLINGS.values())}"
                )
    if not pooling:
        return None
    hidden, act, alone = keys.integer("embedding_length"), variant.pop("act", "tanh"), variant.pop("rows", None)
    head, norm = [], "cls.norm.weight" in keys.tensors
    if pooling == "rank":
        if "cls.weight" in keys.tensors:
            rows = hidden if "cls.output.weight" in keys.tensors else alone or hidden
            head.append(HeadLayer("cls", rows, act, norm))
        if "cls.output.weight" in keys.tensors:
            labels = keys.metadata.get(keys.full("classifier.output_labels"))
            rows = len(labels) if isinstance(labels, list) and labels else 1
            head.append(HeadLayer("cls.output", rows))
        if not head:
            raise keys.error("this model has no head for ranking (cls.weight, cls.output.weight); use a ranking model")
    elif "dense_2.weight" in keys.tensors:
        head = [HeadLayer("dense_2", keys.integer("dense_2_feat_out")), HeadLayer("dense_3", hidden)]
    features = head[-1].rows if head else hidden
    return EncoderConfig(pooling, features, causal, head=tuple(head), **variant)


def check_encoder(keys: Keys, layers: Sequence[LayerConfig]) -> None:
    """Raises UserError for layers that only have kernels with a cache."""
    for layer in layers:
        a = layer.attention
        plain = a and not (a.latent or a.sinks or a.chunk or a.softcap or a.kv_layer is not None or a.output_gate)
        if not plain or not a or a.temperature or a.value_norm or a.norm_after_rope or layer.beside or layer.experts:
            raise keys.error("the layers of this architecture cannot be run without a cache; use an embedding model")


def unread(keys: Keys, encoder: EncoderConfig) -> tuple[str, ...]:
    """The tensors of the file that this encoder does not use: the output matrix, and tensors of other heads."""
    read = {f"{layer.name}{part}" for layer in encoder.head for part in (".weight", ".bias", ".norm.weight")}
    heads = (name for name in keys.tensors if name.startswith(HEADS) and name not in read)
    return (*(name for name in ("output.weight",) if name in keys.tensors), *heads)
