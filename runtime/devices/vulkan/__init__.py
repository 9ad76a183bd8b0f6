"""The vulkan device: SPIR-V kernels on any GPU with a Vulkan driver.

api.py        Vulkan's C interface through ctypes
gpu.py        instances; the GPUs, their features, and the choice of one for an artifact
profile.py    which profile to compile for
context.py    a logical device: queue, command buffers, fences
memory.py     allocation within the GPU's limits, mapping, upload
pipelines.py  SPIR-V -> pipelines, with the driver's cache on disk
commands.py   recording: launches, barriers at hazards, timestamps
replays.py    runs of functions, recorded once, for a RunQueue (runtime/devices/run_queue.py)
io.py         the buffers between host and kernels
device.py     VulkanDevice, the protocol of runtime/devices/__init__.py
"""
