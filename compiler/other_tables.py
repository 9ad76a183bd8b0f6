"""Writes a copy of an artifact with other tables by position. These tables are all that RoPE options change: kernels
and weights stay the same.

In: a compiled artifact; its model with another RoPE configuration. Out: a new artifact folder. It has hard links to the
other files of the first artifact where the file system allows that, and copies elsewhere.
"""

import dataclasses
import os
import shutil
from pathlib import Path
from typing import Any, cast

from mlc_amd.compiler import weights as packing
from mlc_amd.compiler.models.graph import table_columns
from mlc_amd.compiler.weights import TensorSpec, WeightSource
from mlc_amd.runtime.artifact import artifact
from mlc_amd.runtime.artifact.artifact import TABLES, Artifact
from mlc_amd.runtime.artifact.manifest import MANIFEST, ManifestBody


def write_with_tables(plain: Path, model, out: Path) -> None:
    """Writes the folder `out`. plain: the artifact that was compiled with the model's own RoPE configuration. model:
    the model with the other one. Raises UserError if `plain` cannot be read."""
    opened = Artifact.open(plain)
    try:
        body: dict[str, Any] = {key: value for key, value in opened.manifest.items() if key not in ("files", "format")}
        files, held = opened.manifest["files"], opened.weights.header
        with artifact.new_artifact(out) as directory:
            for name in files:
                if name not in (TABLES, MANIFEST):
                    _share(plain / name, directory / name)
            tables = [
                WeightSource(name, "table", (TensorSpec(name, "float32", (body["context"], columns)),))
                for name, columns in table_columns(model.config).items()
                if name in held
            ]
            packing.write(model, "", tables, directory / TABLES, lambda stage, done, total: None, 1)
            body["model"] = body["model"] | {"ropes": dataclasses.asdict(model.config)["ropes"]}
            known = {name: facts["sha256"] for name, facts in files.items() if name != TABLES}
            artifact.write_manifest(directory, cast(ManifestBody, body), known)
    finally:
        opened.close()


def _share(file: Path, place: Path) -> None:
    try:
        os.link(file, place)
    except OSError:  # `file` is on another file system, or there are no hard links
        shutil.copyfile(file, place)
