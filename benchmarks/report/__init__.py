"""Makes tables and figures of the docs from committed result files.

Run as `python -m benchmarks.report`; see `docs/accuracy.md`.
"""
