"""Hours of mixed work on a backend, every answer checked, and what the process holds measured meanwhile."""
