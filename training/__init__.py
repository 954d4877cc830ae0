"""Makes what policies read of a model: gates, adapters, calibration files."""
