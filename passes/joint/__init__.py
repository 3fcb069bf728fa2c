"""Passes of the stage ``joint``: on forward and backward together, or the inference graph, in ATen."""
