"""Decoders by family: a function for each architecture, registered under GGUF's `general.architecture`.

It says what a file's metadata means: returns the ModelConfig, UserError for what the compiler cannot run. Most have the
tensors of tensors.py and the decoder of transformer.py; others define theirs (gemma4.py).
"""
