"""Admissions: which tokens may stay in the cache after the recent window."""
