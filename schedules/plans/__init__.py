"""Workloads and the plans that their kernels can be built with: all of tuning that a compile needs.

workload    what is tuned: an operator with its shapes and formats
space       the plans of a workload on an arch; gpu and cpu define them
"""

from mlc_amd.schedules.plans.space import Kernel, Space, space
from mlc_amd.schedules.plans.workload import Workload

__all__ = ["Kernel", "Space", "Workload", "space"]
