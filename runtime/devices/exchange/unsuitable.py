"""The exception for GPUs that cannot exchange data while kernels run; slower ways remain."""


class Unsuitable(Exception):
    """The message says why."""
