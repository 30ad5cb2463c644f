"""slm-core: one contract, any engine."""
