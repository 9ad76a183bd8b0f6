"""The device of target vulkan: runs SPIR-V kernels on any GPU with a Vulkan driver.

device.py        VulkanDevice, which implements the protocol of runtime/devices/__init__.py; start reading here
gpu.py           the GPUs of this machine with their features and limits; the choice of one for an artifact
profile.py       the profile to compile for on a given GPU
context.py       a logical device: queues, command buffers, fences
memory.py        allocation, mapping and copies
pipelines.py     SPIR-V modules -> pipelines, with the driver's cache on disk
commands.py      recording of launches, with barriers at hazards and timestamps
replays.py       runs of functions: recorded once, submitted for each run, for a RunQueue (runtime/devices/run_queue.py)
io.py            the io buffers: the memory for inputs and results, and the copies between host and GPU
carried.py       the copies of activations between GPUs that share a model
timing.py        timestamps; the memory's bandwidth
fragments.py     whether the driver distributes matrices over lanes as kernels assume
reconvergence.py an execution mode that every module gets
drivers.py       why an installed driver does not start
api.py           Vulkan's C interface through ctypes
"""
