"""Makes tables and figures from committed result files.

Run as `python -m benchmarks.report`; see `docs/accuracy.md`.
"""
