"""Passes of the stage ``joint``; none yet."""
