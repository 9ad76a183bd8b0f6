"""Encoders of texts: embedding and ranking models.

config.py    what they are
metadata.py  that of GGUF files
graph.py     their functions
"""
