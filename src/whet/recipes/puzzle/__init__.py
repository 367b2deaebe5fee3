"""Puzzles: `whet train puzzle`, a tiny recursive model.

recipe      the recipe, which connects the modules below
config      options and the workload they describe
sudoku      solver, generator and symmetries
data        the three splits: generated, from files, or a folder of the official implementation
slots       each place of the batch keeps its puzzle until the model halts it
model       the network, its loss, and the official names of its weights
evaluation  metrics and predictions
"""
