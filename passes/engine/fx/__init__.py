"""Editing, matching and keeping whole of FX graphs."""
