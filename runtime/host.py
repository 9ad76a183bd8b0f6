"""Facts of this machine that more than one part needs."""

import os
from pathlib import Path


def available_threads() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_flags() -> frozenset[str]:
    """Instruction sets of this CPU as Linux names them; empty where /proc/cpuinfo does not list them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return next((frozenset(line.split(":", 1)[1].split()) for line in lines if line.startswith(("flags", "Features"))), frozenset())
