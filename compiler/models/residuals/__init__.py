"""Residual streams of decoders that are more than x + block(x).

config.py has the formulas; streams.py emits the graph; ngrams.py emits the embeddings that are added before a layer.
"""
