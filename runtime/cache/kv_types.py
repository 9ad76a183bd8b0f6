"""Types of the KV cache, by their names in llama.cpp, and the tensors of a layer's cache: keys, values and, where these
are codes, their scales. Layouts are the targets' (schedules/cpu/attention/cache.py,
schedules/gpu/attention/cache.py).
"""

from typing import Literal

KvType = Literal["f16", "q8_0"]
KV_TYPE: KvType = "f16"  # by default
KV_TENSORS: dict[str, tuple[str, ...]] = {"f16": ("k", "v"), "q8_0": ("k", "v", "ks", "vs")}
LATENT_TENSORS = ("k",)  # where values are columns of the keys; f16 only
