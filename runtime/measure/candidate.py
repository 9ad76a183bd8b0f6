"""Candidates. A candidate is one compiled kernel, in a folder with everything needed to measure it.

    candidate.json
        format      2
        workload    {"op", "args"}, and plan: the source of the kernel
        api, arch   "vulkan" | "rocm" | "cpu", and the profile or arch that it was compiled for
        needs       vulkan: the requirements of the profile (Profile.needs); cpu: {"flags": [..]}
        code        name of the file: .spv (modules one after the other), .hsaco or .so
        steps       launches of a call, as in the entries of an artifact's launches (dist/README.md); cpu:
                    [{"symbol", "args"}]
        scratch     bytes of each buffer for data between the steps
        params      [{"name", "shape", "dtype", "role", ..}] in the order of the kernel's parameters; see ROLES
        states      [[position, live rows, single rows, 0], ..]: the states in which it is verified (`inputs.py`)
        cases       [{"name", "state", "bytes", "flops"}]: the conditions of timing
        bytes       bytes that a call must move (weights and cache); flops: its operations. Means over the cases

The role of a parameter determines how it is filled (`inputs.py`), whether calls rotate over copies of it, and whether
it is compared.
"""

import json
import math
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from mlc_amd.runtime.errors import UserError

FORMAT = 2
FILE = "candidate.json"
ROLES = {
    "state": "the int32[4] of a step's rows",
    "rows": "position and slot of each row",
    "pages": "page of each slot's block of positions",
    "input": "activations of the kernel before",
    "weight": "read from memory once per call: weights, norm factors, biases, the table of RoPE",
    "cells": "the cells of each slot's state, to read and to write",
    "cache": "keys or values; read, maybe written",
    "states": "states of sequences; read and written",
    "output": "written only",
    "work": "scratch memory whose size depends on the plan; contents are undefined",
    "zero": "as work, but zero before the first call and after each",
}
STEP = ("state", "rows", "pages", "cells")  # these differ between states
ROTATING = ("weight", "cache", "states")  # consecutive calls use different copies of these
PRIVATE = ("work", "zero")  # the size of these may differ between plans
WRITTEN = ("cache", "states", "output")


@dataclass(frozen=True)
class Param:
    """One parameter. facts: its other entries, which depend on the role."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    role: str
    facts: dict = field(compare=False)

    @property
    def numpy(self) -> np.dtype:
        return np.dtype(self.dtype.replace("bfloat16", "uint16"))

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.numpy.itemsize

    @property
    def share(self) -> float:
        """For a weight: the share of it that a call reads."""
        return self.facts.get("share", 1.0)


@dataclass(frozen=True)
class Candidate:
    """The content of a folder's candidate.json. facts: all of it."""

    folder: Path
    facts: dict = field(compare=False)

    @cached_property
    def params(self) -> tuple[Param, ...]:
        """The parameters. Paged caches get one more page for each single row, which it writes (`inputs.py`)."""
        rest, paged = ("name", "shape", "dtype", "role"), any(p["role"] == "pages" for p in self.facts["params"])
        states = [*self.facts["states"], *(case["state"] for case in self.cases)]
        private = max((single for _, _, single, *_ in states), default=0) if paged else 0
        return tuple(
            Param(
                p["name"],
                (p["shape"][0] + private, *p["shape"][1:]) if p["role"] == "cache" else tuple(p["shape"]),
                p["dtype"],
                p["role"],
                {key: value for key, value in p.items() if key not in rest},
            )
            for p in self.facts["params"]
        )

    @property
    def api(self) -> str:
        return self.facts["api"]

    @property
    def cases(self) -> list[dict]:
        return self.facts["cases"]

    @property
    def steps(self) -> list[dict]:
        return self.facts["steps"]

    @property
    def int8(self) -> bool:
        """Whether its plan converts float16 activations of the workload to int8. Then results are less exact."""
        return bool((self.facts.get("plan") or {}).get("int8"))

    @property
    def code(self) -> Path:
        return self.folder / self.facts["code"]

    @property
    def group(self) -> str:
        """A key that is equal for candidates of one workload. They are filled, run and timed in the same memory."""
        shared = [(p.name, p.shape, p.dtype, p.role) for p in self.params if p.role not in PRIVATE]
        return json.dumps([self.api, self.facts["arch"], self.facts["workload"], shared], sort_keys=True)


def read(folder: str | Path) -> Candidate:
    """Reads a candidate. Raises UserError for a folder without a candidate, or with one of another version."""
    folder = Path(folder)
    try:
        facts = json.loads((folder / FILE).read_text())
    except (OSError, ValueError, RecursionError) as e:
        raise UserError(f"{folder} holds no candidate to measure ({e}); export the kit again") from e
    if not isinstance(facts, dict) or facts.get("format") != FORMAT:
        raise UserError(f"{folder} was made by another version of mlc-amd; export the kit again")
    return Candidate(folder, facts)


def write(folder: Path, facts: dict) -> Candidate:
    """Writes candidate.json atomically, after all other files: a folder that has it is complete."""
    temporary = folder / f".{FILE}.tmp"
    temporary.write_text(json.dumps({"format": FORMAT} | facts))
    temporary.replace(folder / FILE)
    return read(folder)


def figures(candidate: dict, seconds: float) -> dict:
    """{"us", "gbps", "tflops"} of a call that took `seconds`. candidate: the content of candidate.json."""
    rates = {"gbps": candidate["bytes"] / seconds / 1e9, "tflops": candidate["flops"] / seconds / 1e12}
    return {"us": seconds * 1e6} | rates
