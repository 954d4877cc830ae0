"""Captures: what the forward pass shows of tokens, for policies to read at events."""
