"""Trains WG-KV's write gates and DMS's drop decisions."""
