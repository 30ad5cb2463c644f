"""The suite: its scenarios, their tools, and the adoption by test modules."""
