"""Allocators: how a budget is shared among heads, layers and segments."""
