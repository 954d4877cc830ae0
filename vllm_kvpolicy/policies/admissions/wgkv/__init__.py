"""WG-KV: trained write gates admit tokens to the long-term cache."""
