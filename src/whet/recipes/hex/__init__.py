"""Hex: nets that say where to play and who wins."""
