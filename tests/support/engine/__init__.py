"""Real engines in this process, the oracles that judge them, and a simulator."""
