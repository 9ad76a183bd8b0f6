"""How kernels are called, in a few bytes at the end of the file that has them: a digest of what the manifest declares
of them, by which a manifest that does not belong to the kernels is refused.

Kernels do not check their arguments. That these are as large as declared is what manifest_check.py compares; that the
declarations are those that the kernels were compiled for is what the digest says. Loaders of shared libraries, code
objects and SPIR-V modules know where their part of the file ends.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

_MARK = b"mlc-amd interface "
BYTES = len(_MARK) + 64  # at the end of a file


def digest(needs: Any, kernels: Iterable[Mapping[str, Any]], launched: Mapping[str, Any] | None) -> str:
    """needs: what a machine must have; kernels: the manifest's; launched: its `launches` of one arch, None for target
    cpu."""
    declared = {
        kernel["name"]: [(param["dtype"], list(param["shape"]), param["role"]) for param in kernel["params"]]
        for kernel in kernels
    }
    text = json.dumps([needs, declared, launched], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


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
