"""Tables and figures of the docs, made from committed result files.

Run as `python -m benchmarks.report`; see `docs/accuracy.md`.
"""
