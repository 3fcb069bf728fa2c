"""FX graphs: editing, patterns, snapshots."""
