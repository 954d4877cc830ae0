"""Which tokens a KV head keeps: scorers, allocators and the policies they form.

Process: any
"""
