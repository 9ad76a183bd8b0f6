"""Projectors: a file for each, or for those that differ in little, registered under `clip.projector_type`.

A function reads what the encoder's metadata says beyond what all have in common; `project` emits what follows the
encoder's layers. Formulas are those of llama.cpp (tools/mtmd/models), which vision_refs of the tests compares.
"""
