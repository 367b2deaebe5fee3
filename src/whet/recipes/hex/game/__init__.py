"""The game of Hex: board, rules, records, players, and positions on disk. Requires only numpy."""
