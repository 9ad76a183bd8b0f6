"""What kernels compute, a second time: plain numpy that shares no code with the kernels, for `selftest` and the tests.

weights.py      packed planes -> numbers
activations.py  the layouts in which kernels hand over rows of numbers
attention.py    attention, RoPE, and the layouts of the KV cache
experts.py      the parts of a mixture of experts
operators.py    the table of operators: what a call of each gives, for all rows and columns or for a sample of them
compare.py      results of a kernel against these, and what may differ
plan.py         whole functions of an artifact, launch by launch
"""
