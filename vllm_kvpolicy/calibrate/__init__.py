"""Makes the files that calibrated policies read."""
