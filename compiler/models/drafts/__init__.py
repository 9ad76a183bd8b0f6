"""Models that guess the next tokens of another one, and read its rows.

config.py  what they are, of the model's own predictor layers, too
files.py   GGUF files of drafts as a part of the model that they guess for
graphs.py  their functions
"""
