"""Measures kernels. In: candidates in folders. Out: seconds. This part of tuning runs on the machine with the device;
it needs only the runtime.

candidate.py    the format of a candidate's folder; figures from seconds
inputs.py       inputs of kernels
timing.py       times the candidates of a workload side by side
vulkan.py, hip.py, cpu.py   the devices
compare.py      compares the results of two kernels
program.py      the measuring child process
child.py        child processes that may crash
measurer.py     `Measurer`: the parent of the measuring process
run_kit.py      measures a kit
"""
