"""The command line of a bundle: `mlc-amd` from the folder beside this file, with the bundle's model as the default one.
See run.sh."""

import os
import sys
from pathlib import Path

here = Path(__file__).resolve().parent
sys.path.insert(0, str(here / "lib"))
os.environ.setdefault("MLC_AMD_MODEL", str(here / "model"))

if __name__ == "__main__":
    from mlc_amd.tools.cli import main

    sys.exit(main(sys.argv[1:] or ["chat"]))
