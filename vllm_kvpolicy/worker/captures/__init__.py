"""What is recorded while tokens are computed, for policies to read at events."""
