"""Attention to keys that stand for several positions each (DeepSeek V4).

config.py has its formula, its tensors and its caches, attention.py its graph.
"""
