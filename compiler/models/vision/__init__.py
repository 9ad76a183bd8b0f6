"""Image encoders: from the metadata of an mmproj file to a configuration, tensors and Relax functions.

registry.py has the registry of projectors, which are files in `projectors`; encoder.py emits the graph that all
encoders share. Only graph.py imports TVM.
"""
