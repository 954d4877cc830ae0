"""Compares with kvpress on the same questions, weights and budgets.

Run as `python -m benchmarks.peer`; see `docs/peer.md`.
"""
