"""The suite: its scenarios, what they stand on, and how a test module adopts them."""
