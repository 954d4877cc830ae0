"""How survivors are laid out: equal lengths for all heads, or ragged."""
