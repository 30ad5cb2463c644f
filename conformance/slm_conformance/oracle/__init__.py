"""The references of scenarios: the float64 reference, the twin, and the tiny random models."""
