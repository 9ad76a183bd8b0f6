"""Attention to keys that stand for several positions each (DeepSeek V4).

config.py has its formula, its tensors and what it keeps of sequences, attention.py its graph.
"""
