"""Kernels as TVM builds them: see the packages below.

What imports TVM imports this package first. TVM then leaves out the hooks of its own backends, of which this project
uses none: `compiler/codegen` generates code for GPUs, `runtime/devices` runs it. And its module for clusters, which
does not find its library then; the first error in TVM's libraries makes it read all their symbols. Together they are
two fifths of TVM's import.
"""

import os
import sys

os.environ.setdefault("TVM_DEVICE_BACKEND_AUTOLOAD", "0")
sys.modules.setdefault("tvm.runtime.disco", None)  # type: ignore[arg-type]
