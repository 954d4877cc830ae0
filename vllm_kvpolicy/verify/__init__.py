"""Says whether policies do what they should on this machine, or on a running server."""
