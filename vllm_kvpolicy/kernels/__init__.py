"""Operations on tensors: a PyTorch reference each, and faster twins of some."""
