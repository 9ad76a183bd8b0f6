"""Projectors: a file for each, or for several similar ones, registered by `clip.projector_type`.

A function reads the metadata that not all encoders have; `project` emits what follows the encoder's layers. The
formulas are llama.cpp's (tools/mtmd/models); vision_refs of the tests compares the results.
"""
