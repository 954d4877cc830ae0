"""Measures policies with a pretrained language model: see `__main__`."""
