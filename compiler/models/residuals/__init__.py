"""Residual streams of decoders that are more than x + block(x).

config.py has their formulas, streams.py their graph; ngrams.py the graph of what is added to them before a layer.
"""
