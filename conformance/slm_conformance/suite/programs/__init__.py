"""Random programs of calls on contexts, sessions and chats, and models of all three in plain Python."""
