"""Tuning a model's kernels: its tasks, candidates built and checked, and the ways to measure them."""
