"""The catalogue: policy names and options; imports neither torch nor vLLM."""
