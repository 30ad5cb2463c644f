"""Checks that other people's clients work with ``slm serve``; see ``__main__.py``."""
