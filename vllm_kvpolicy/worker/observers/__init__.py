"""What a worker writes down of its events, for a trace and for the live page."""
