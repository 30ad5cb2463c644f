"""Readers of answers: one family of tool-call and reasoning syntax a file."""
