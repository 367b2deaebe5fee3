"""The game of Hex: board, rules, records, players, and positions on disk. Uses only numpy."""
