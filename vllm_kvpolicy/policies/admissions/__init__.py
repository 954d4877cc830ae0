"""Admissions: what may stay in the cache once it leaves the newest tokens."""
