"""What `vllm-kvpolicy` does; serving never imports it."""
