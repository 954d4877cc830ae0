"""The worker's side of an event: page views, slots, query windows, attention backends.

Process: worker
"""
