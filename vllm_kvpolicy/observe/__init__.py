"""What a server counts, records and shows of itself; it never stops serving."""
