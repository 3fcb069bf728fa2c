"""Passes of the stage ``pre_grad``: on Dynamo's graph, torch IR."""
