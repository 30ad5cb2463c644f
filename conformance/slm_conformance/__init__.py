"""The conformance suite: scenarios that say, clause by clause, what a backend keeps of the contract."""
