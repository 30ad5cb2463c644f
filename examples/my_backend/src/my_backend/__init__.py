"""An example of a backend for slm-core."""
