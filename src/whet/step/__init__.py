"""Optimizer steps: applying a plan to a model, forward, backward, clipping, update, EMA, graphs and rollback."""
