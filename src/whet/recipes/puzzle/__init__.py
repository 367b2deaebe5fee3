"""The puzzle recipe: train a tiny recursive model with `whet train puzzle`.

recipe      the recipe, which connects the modules below
config      options, and the workload that they describe
sudoku      solver, generator and symmetries of Sudokus
data        the three splits: generated, from files, or from a folder of the official implementation
builders    builds such folders from CSV files and ARC JSON files
slots       puzzles and states that stay in the batch until the model halts them
model       the network, its loss, and the official names of its weights
evaluation  metrics and predictions
arc         votes of the predictions for ARC tasks
official    import of official checkpoints
"""
