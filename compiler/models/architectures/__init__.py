"""Decoders by family: a function for each architecture, registered by GGUF's `general.architecture`.

The function reads a file's metadata and returns the ModelConfig; it raises UserError for what the compiler cannot run.
Most architectures have the tensors of tensors.py and the decoder of transformer.py; others define their own
(gemma4.py).
"""
