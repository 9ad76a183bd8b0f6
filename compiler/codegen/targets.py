"""The targets by name."""

import importlib

from mlc_amd.compiler.codegen.target import Target
from mlc_amd.runtime.cache.kv_types import KV_TENSORS, KV_TYPE
from mlc_amd.runtime.errors import UserError

# module and class, imported on demand
TARGETS = {
    "cpu": ("cpu", "CpuTarget"),
    "rocm": ("rocm_target", "RocmTarget"),
    "vulkan": ("vulkan_target", "VulkanTarget"),
}


def make_target(target: str, arch: str, kv: str = KV_TYPE) -> Target:
    """The Target of a name in TARGETS, for an arch as in --arch and a type of the KV cache. UserError for unknown
    ones."""
    if target not in TARGETS:
        raise UserError(f"unknown target '{target}'; known: {', '.join(TARGETS)}")
    if kv not in KV_TENSORS:
        raise UserError(f"unknown type '{kv}' of the KV cache; known: {', '.join(KV_TENSORS)}")
    module_name, class_name = TARGETS[target]
    return getattr(importlib.import_module(f"mlc_amd.compiler.codegen.{module_name}"), class_name)(arch, kv)
