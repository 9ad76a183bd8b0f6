"""The rocm device: an artifact's code objects on an AMD GPU, through AMD's HIP runtime.

api.py        AMD's bindings: opening them, errors as exceptions
diagnosis.py  why there is no GPU, as a message for users
gpu.py        which GPUs there are, and which of them serves an artifact with which code object
memory.py     blocks for weights, cache, arena and io; upload
launches.py   kernel launches, one by one and captured in a graph; their times, and that of a copy, by events
runs.py       runs of functions for a RunQueue (runtime/devices/run_queue.py)
device.py     HipDevice, the protocol of runtime/devices/__init__.py
"""
