"""A backend for slm-core."""
