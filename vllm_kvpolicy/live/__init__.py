"""What running engines tell the API processes of their host, and who shows it."""
