"""A digest of the interface of compiled kernels, computed from the manifest's entries. It is stored in the last bytes
of the file of kernels, so that a manifest that does not belong to the kernels is rejected.

Kernels do not check their arguments, and some compute addresses from results of earlier kernels (the experts of a row,
the order of rows). So the digest covers everything that determines their arguments: parameters, launches with their
offsets in the arena, and the sizes of buffers and of random weights. manifest_check.py checks that these are
consistent; the digest shows that they are those the kernels were compiled with. Loaders ignore the bytes of the digest,
which follow the code.
"""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

_MARK = b"mlc-amd interface "
BYTES = len(_MARK) + 64  # length of what is appended to a file
_PLAN = ("context", "page", "functions", "arena_bytes", "io", "kv", "tensors")  # keys of the manifest


def digest(manifest: Mapping[str, Any], arch: str) -> str:
    """The digest for the kernels of one arch. The manifest must have plain JSON values: its strings are of type str."""
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


def append(library: Path, found: str) -> None:
    """Appends a digest to a file of kernels."""
    with open(library, "ab") as file:
        file.write(_MARK + found.encode())


def of_file(library: Path) -> str:
    """The digest at the end of a file of kernels; "" if it has none."""
    with open(library, "rb") as file:
        file.seek(max(file.seek(0, os.SEEK_END) - BYTES, 0))
        end = file.read(BYTES)
    return end[len(_MARK) :].decode("ascii", "replace") if end.startswith(_MARK) else ""
