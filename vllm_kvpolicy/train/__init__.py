"""Trains WG-KV's write gates and DMS's drop decisions."""

from importlib.util import find_spec

if find_spec("accelerate") is None:
    # With this name `python -m` says it in one line.
    raise ImportError(
        "the trainers need accelerate, this package's extra `train`: pip install "
        "accelerate",
        name=__name__,
    )
