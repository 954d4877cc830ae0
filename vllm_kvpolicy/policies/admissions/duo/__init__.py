"""DuoAttention: some heads keep everything, the others the newest tokens."""
