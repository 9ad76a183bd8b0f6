"""The operators a second time, in plain numpy that shares no code with the kernels. `selftest` and the tests compare
kernels with it.

weights.py      packed planes -> numbers
activations.py  the layouts in which kernels pass rows of numbers to one another
attention.py    attention, RoPE, and the layouts of the KV cache
experts.py      the parts of a mixture of experts
operators.py    the table of operators: the results of a call, for all rows and columns or for a sample of them
compare.py      compares the results of a kernel with these, and has the tolerances
plan.py         computes whole functions of an artifact, launch by launch
"""
