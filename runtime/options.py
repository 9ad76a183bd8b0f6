"""What a user may choose about a compilation, as one value from the command line to compiler/pipeline.py.

It lies in the runtime because bundles, which have no compiler, take the same flags.
"""

from dataclasses import dataclass
from typing import Literal

from mlc_amd.runtime.cache.kv_types import KvType

Tuned = Literal["none", "shipped", "user", "auto"]  # sources of tuned plans; auto: the user's before shipped ones


@dataclass(frozen=True)
class CompileOptions:
    """target    cpu, rocm or vulkan; "auto" is for tools/target.py to replace
    arch      as --arch: one or several names for that target; "native": this machine's
    ctx       tokens of KV cache; None: the model's context, at most 4096
    kv_type   of the KV cache; None: runtime/cache/kv_types.py's KV_TYPE
    tuned     source of tuned plans
    weights   whether the artifact has the matrices; without them a device fills them at random
    """

    target: str = "auto"
    arch: str = "native"
    ctx: int | None = None
    kv_type: KvType | None = None
    tuned: Tuned = "auto"
    weights: bool = True
