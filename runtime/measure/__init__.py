"""Measuring kernels: candidates in folders -> seconds. The part of tuning that runs where the device is; it needs the
runtime only.

candidate.py    the format of a candidate's folder; figures from seconds
inputs.py       what kernels compute on
timing.py       timing the candidates of a workload side by side
vulkan.py, hip.py, cpu.py   the devices
compare.py      whether two kernels agree
program.py      the child process that does it
child.py        child processes that may die
measurer.py     `Measurer`: the other side of the child process
run_kit.py      measuring a kit
"""
