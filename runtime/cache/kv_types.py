"""The types of the KV cache, by their names in llama.cpp, and the tensors of a layer's cache: keys, values, and the
scales of those that are stored as codes. The layout depends on the target (schedules/cpu/attention/cache.py,
schedules/gpu/attention/cache.py)."""

from typing import Literal, NamedTuple

KvType = Literal["f16", "q8_0", "q4_0", "q8_0/q4_0"]  # one type for keys and values, or keys/values
KV_TYPE: KvType = "f16"  # the default


class Codes(NamedTuple):
    """How elements are stored as codes of `bits` bits from `lowest` to `highest`: element = code * scale. KV_BLOCK
    columns of a head share a float16 scale.

    rotated  each head is multiplied by a Hadamard matrix before it is stored
    refits   after the codes are chosen, the scale is changed to the one with the least squared error
    """

    bits: int
    lowest: int
    highest: int
    rotated: bool = False
    refits: bool = False


CODES = {"q8_0": Codes(8, -127, 127), "q4_0": Codes(4, -8, 7, rotated=True, refits=True)}  # other types are float16


def codes_of(kv: str) -> tuple[Codes | None, Codes | None]:
    """The codes of keys, and of values, of a KvType; None for float16."""
    types = kv.split("/")
    return CODES.get(types[0]), CODES.get(types[-1])


def latent_type(kv: str) -> str:
    """The type for layers of latent attention. Their cache is small and serves as keys and values, so it is q8_0
    instead of q4_0."""
    return "q8_0" if any(codes_of(kv)) else kv


def tensors_of(kv: str, latent: bool) -> tuple[str, ...]:
    """The names of the tensors of a layer's cache. latent: values are columns of the keys."""
    names = ("k",) if latent else ("k", "v")
    scales = (name + "s" for name, codes in zip(names, codes_of(kv), strict=False) if codes)
    return *names, *scales
