"""Image encoders: from the metadata of an mmproj file to its configuration, its tensors, and Relax functions.

registry.py has the projectors, of which each has a file in `projectors`; encoder.py the graph that they share. Only
graph.py imports TVM.
"""
