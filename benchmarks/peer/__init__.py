"""The same questions, weights and budgets on a peer: kvpress, in its own environment.

Run as `python -m benchmarks.peer`; see `docs/peer.md`.
"""
