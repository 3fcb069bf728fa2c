"""A custom operator with its converter, and two passes, for dynamo-backends."""
