"""Encoders of texts: embedding and ranking models.

config.py    their configuration
metadata.py  reads it from GGUF files
graph.py     emits their functions
"""
