"""Types of the KV cache, by their names in llama.cpp, and the tensors of a layer's cache: keys, values and, where these
are codes, their scales. Layouts are the targets' (schedules/cpu/attention/cache.py,
schedules/gpu/attention/cache.py).
"""

from typing import Literal, NamedTuple

KvType = Literal["f16", "q8_0", "q4_0", "q8_0/q4_0"]  # of keys and values, or keys/values
KV_TYPE: KvType = "f16"  # by default


class Codes(NamedTuple):
    """Elements as codes of so many bits, from `lowest` to `highest`: element = code * scale, with a float16 scale for
    KV_BLOCK columns of a head.

    rotated  of heads that are multiplied by a Hadamard matrix before
    refits   once the codes are chosen, the scale becomes the one with which squared errors are least
    """

    bits: int
    lowest: int
    highest: int
    rotated: bool = False
    refits: bool = False


CODES = {"q8_0": Codes(8, -127, 127), "q4_0": Codes(4, -8, 7, rotated=True, refits=True)}  # others are float16


def codes_of(kv: str) -> tuple[Codes | None, Codes | None]:
    """Of keys and of values of a KvType."""
    types = kv.split("/")
    return CODES.get(types[0]), CODES.get(types[-1])


def latent_type(kv: str) -> str:
    """The type that a layer of latent attention, whose cache is small and serves as keys and values, has instead."""
    return "q8_0" if any(codes_of(kv)) else kv


def tensors_of(kv: str, latent: bool) -> tuple[str, ...]:
    """Names of the tensors of a layer's cache. latent: values are columns of the keys."""
    names = ("k",) if latent else ("k", "v")
    scales = (name + "s" for name, codes in zip(names, codes_of(kv), strict=False) if codes)
    return *names, *scales
