"""Hours of mixed work on a backend, with every answer checked and the process's resources measured."""
