"""The vulkan device: SPIR-V kernels on any GPU with a Vulkan driver.

api.py        Vulkan's C interface through ctypes
gpu.py        instances; which GPUs there are, what they can do, and which of them serves an artifact
profile.py    which profile to compile for
context.py    a logical device: queue, command buffers, fence; what goes wrong in words for users
memory.py     allocation within the GPU's limits, mapping, upload
pipelines.py  SPIR-V -> pipelines, with the driver's cache on disk
commands.py   recording: launches, barriers where there are hazards, timestamps
replays.py    runs of functions, in pieces where they take long
device.py     VulkanDevice, the protocol of runtime/devices/__init__.py
"""
