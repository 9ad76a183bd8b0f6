"""Servers and their clients in tests: ours, the Hub, a scripted answer, a browser."""
