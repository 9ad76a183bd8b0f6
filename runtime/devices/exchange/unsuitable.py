"""The exception for GPUs that cannot exchange words while kernels run. Callers then exchange between kernels."""


class Unsuitable(Exception):
    """The message is the reason."""
