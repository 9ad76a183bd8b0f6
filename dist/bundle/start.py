"""The command line of a bundle: `mlc-amd` from the folder beside this file, with the bundle's model as the default one,
and `chat` as the default command. See run.sh, which also finds a Python: `python3 start.py serve` takes this one."""

import os
import sys
from pathlib import Path

here = Path(__file__).resolve().parent
sys.path.insert(0, str(here / "lib"))
os.environ.setdefault("MLC_AMD_MODEL", str(here / "model"))
os.environ["MLC_AMD_PROGRAM"] = "run.sh"


def command(words: list[str]) -> list[str]:
    """The command line for these words: a chat where they name no command."""
    first = next((word for word in words if word != "--debug"), "--")
    return ["chat", *words] if first.startswith("-") and first not in ("-h", "--help", "--version") else words


if __name__ == "__main__":
    if sys.implementation.cache_tag not in "@TAGS@".split():
        sys.exit(f"error: this is Python {sys.version.split()[0]}; the bundle needs one of @PYTHONS@")
    sys.dont_write_bytecode = sys.pycache_prefix is None  # nothing is written here
    from mlc_amd.tools.start import main

    sys.argv[1:] = command(sys.argv[1:])
    sys.exit(main())
