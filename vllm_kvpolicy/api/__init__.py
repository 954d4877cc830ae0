"""The API process: flags, checks of engines and requests, and the wraps of vLLM."""
