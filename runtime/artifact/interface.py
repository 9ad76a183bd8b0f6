"""How kernels are called, in a few bytes at the end of the file that has them: a digest of what the manifest says of
that, by which a manifest that does not belong to the kernels is refused.

Kernels do not check their arguments, and some compute addresses with what kernels before them left in memory (the
experts of a row, the order of rows). So all that decides what they get is covered: parameters, launches with their
places in the arena, and the sizes of buffers and of weights that are drawn. manifest_check.py compares these with one
another, the digest tells that they are those which were compiled. Loaders of shared libraries, code objects and SPIR-V
modules know where their part of the file ends.
"""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

_MARK = b"mlc-amd interface "
BYTES = len(_MARK) + 64  # at the end of a file
_PLAN = ("context", "page", "functions", "arena_bytes", "io", "kv", "tensors")  # of the manifest


def digest(manifest: Mapping[str, Any], arch: str) -> str:
    """Of the kernels of one arch of a manifest, which has plain JSON values: strings are of type str."""
    target = manifest["target"]
    needs = [target.get("flags"), target.get("needs", {}).get(arch), manifest["launches"].get(arch)]
    plan = [manifest["model"]["vocab"], *(manifest[key] for key in _PLAN)]
    declared = [
        [kernel["name"], kernel["operator"], kernel["args"], kernel["states"], *map(_param, kernel["params"])]
        for kernel in manifest["kernels"]
    ]
    return hashlib.sha256(msgspec.json.encode([arch, needs, plan, declared], order="deterministic")).hexdigest()


def _param(param: Mapping[str, Any]) -> list:
    return [param["name"], param["dtype"], param["shape"], param["role"], param.get("experts")]


def append(library: Path, made: str) -> None:
    """Writes a digest behind the kernels."""
    with open(library, "ab") as file:
        file.write(_MARK + made.encode())


def of_file(library: Path) -> str:
    """The digest of a file of kernels; "" where it has none."""
    with open(library, "rb") as file:
        file.seek(max(file.seek(0, os.SEEK_END) - BYTES, 0))
        end = file.read(BYTES)
    return end[len(_MARK) :].decode("ascii", "replace") if end.startswith(_MARK) else ""
