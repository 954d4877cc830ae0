"""The worker process: runs events before each forward pass."""
