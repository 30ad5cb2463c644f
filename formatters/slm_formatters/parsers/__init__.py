"""Parsers of answers: one syntax of tool calls and reasoning per file."""
