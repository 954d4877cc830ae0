"""The API process: flags, checks before an engine starts and of each request, wraps."""
