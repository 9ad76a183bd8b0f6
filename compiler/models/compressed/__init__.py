"""Attention to compressed keys, which stand for several positions each (DeepSeek V4).

config.py has the formula, the tensors, and the states and caches; attention.py emits the graph.
"""
