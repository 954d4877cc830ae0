"""Trains what policies need besides the model: the write gates of WG-KV, the decisions
of DMS.
"""
