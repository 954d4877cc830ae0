"""Bounded, well-chosen KV caches for vLLM.

Process: any
"""
