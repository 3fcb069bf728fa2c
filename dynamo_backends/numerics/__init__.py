"""What is right: float64 as the reference, distances to it, and when an error is explained by eager's own."""
