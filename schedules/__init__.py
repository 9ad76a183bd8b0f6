"""Operators, and their kernels as TensorIR for CPUs and GPUs: see the packages below.

Every module that imports TVM imports this package first, which makes TVM's import faster by two fifths:

- TVM does not load its own device backends. This project does not use them: `compiler/codegen` generates code for GPUs,
  and `runtime/devices` runs it.
- TVM does not import its module for clusters (disco), which would fail without these backends. The first error in TVM's
  libraries makes it read all their symbols.
"""

import os
import sys

os.environ.setdefault("TVM_DEVICE_BACKEND_AUTOLOAD", "0")
sys.modules.setdefault("tvm.runtime.disco", None)  # type: ignore[arg-type]
