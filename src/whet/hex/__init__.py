"""Hex, the game: rules for thousands of boards at once, records, players and positions to learn from. numpy only.

board        sizes, colours, cells and their names
rules        positions as arrays: who is to move, what is legal, what comes after, who has won
connecting   winners of many boards at once, rows as bit words
chains       the winner of one game while it is played, by union-find
game         one game: moves, swap, taking back
symmetry     the four symmetries of the board, for positions, moves and policies
player       what every player can be asked, with a net or without
groups       which stones hang together
distance     how far is a cell from an edge, if the opponent answers? (two-distance)
two_distance the player that goes by it
games        many games as arrays, and all their positions
self_play    games of a noisy player against itself, the same for the same seed
solving      who wins with perfect play, on boards up to 4x4
known        who plays without a net
records/     .trmph, HexWorld and plain lists of moves
positions/   positions to learn from, on disk
play/        a game with a person, in the terminal and on a page
"""
