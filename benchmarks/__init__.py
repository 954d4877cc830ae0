"""Measurements of the plugin beside stock vLLM; run from the root of the repository."""
