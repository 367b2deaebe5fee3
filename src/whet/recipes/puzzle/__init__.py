"""`whet train puzzle`: a tiny recursive model that learns to solve puzzles.

config      what can be set
sudoku      grids, puzzles with one solution, and symmetries
solving     all solutions of many Sudokus at once
reading     puzzles from lines of text, and from folders of arrays
data        the three parts that a run sees
model       the network and its recursion: one step of supervision
halting     slots: a puzzle stays in its place of the batch until the model halts it
loss        what a step is trained on
judging     how many puzzles are right after each step
answering   what it says to Sudokus in lines
exchange    the names that the reference implementation has for the same weights
"""
