"""Operations on tensors, each with a PyTorch reference."""
