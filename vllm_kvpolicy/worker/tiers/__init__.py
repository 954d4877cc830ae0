"""Tiers: how survivors are laid out, equally many tokens per head or ragged."""
