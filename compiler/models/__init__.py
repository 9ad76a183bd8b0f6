"""Models: from GGUF's metadata to a description of each layer, its tensors, and Relax functions.

registry.py has the architectures. Nothing here imports TVM except graph.py, build.py and what emits operators: files
are read and checked without it.
"""
