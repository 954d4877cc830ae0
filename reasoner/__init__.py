"""Owns a small reasoning model for vLLM: problems, tokenizer, training, evaluation."""
