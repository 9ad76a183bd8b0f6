"""Drafts: models that guess the next tokens of another model, and read its rows.

config.py  their configuration, also that of the model's own predictor layers
files.py   reads GGUF files of drafts, and joins a draft with its model
graphs.py  emits their functions
"""
