"""Chat formats by name: one family a file."""
