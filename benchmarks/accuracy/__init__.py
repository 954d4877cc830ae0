"""Accuracy of policies on checkable problems, through the OpenAI API.

Run as `python -m benchmarks.accuracy`; see `docs/accuracy.md`.
"""
