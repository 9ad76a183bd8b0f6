"""Measures kernels: candidates in folders -> seconds. The part of tuning that runs on the machine with the device; it
needs the runtime only.

candidate.py    the format of a candidate's folder; figures from seconds
inputs.py       inputs of kernels
timing.py       timing the candidates of a workload side by side
vulkan.py, hip.py, cpu.py   the devices
compare.py      whether two kernels agree
program.py      the measuring child process
child.py        child processes that may crash
measurer.py     `Measurer`: the parent of the measuring process
run_kit.py      measuring a kit
"""
