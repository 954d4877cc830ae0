"""KVzap: surrogates of KVzip+ decide which tokens leave the cache."""
