"""vLLM's attention backends over compacted pages."""
