"""Passes of the stage ``pre_grad``; none yet."""
