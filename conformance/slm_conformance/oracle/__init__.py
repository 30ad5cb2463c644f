"""What scenarios compare a backend with: the float64 reference, the twin, and the tiny random models that they run."""
