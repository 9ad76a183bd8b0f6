"""Tuning of a model's kernels: tasks, candidates, the search, and the ways to build, measure and verify candidates."""
