"""The device of target rocm: runs an artifact's code objects on an AMD GPU, through AMD's HIP runtime.

device.py        HipDevice, which implements the protocol of runtime/devices/__init__.py; start reading here
gpu.py           the GPUs of this machine; the choice of one for an artifact, and of the code object for it
code_objects.py  loading of code objects
memory.py        blocks for weights, KV cache, arena, scratch memory and io buffers; the copies between host and GPU
launches.py      kernel launches, one by one or as a graph; times of launches and of a copy, by events
runs.py          runs of functions on a stream, for a RunQueue (runtime/devices/run_queue.py)
carried.py       the copies of activations between GPUs that share a model
diagnosis.py     why HIP finds no GPU, as a message for users
api.py           AMD's bindings: opening them, errors as exceptions
"""
