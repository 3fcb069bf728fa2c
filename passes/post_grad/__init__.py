"""Passes of the stage ``post_grad``: on the forward, backward or inference graph in ATen."""
