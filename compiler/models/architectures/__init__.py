"""Decoders, one file per architecture, named as GGUF's `general.architecture`.

A file says what its metadata means: `read(keys)` returns the ModelConfig, UserError for what the compiler cannot run.
Most have the tensors of tensors.py and the decoder of transformer.py; others define theirs (gemma4.py).
"""
