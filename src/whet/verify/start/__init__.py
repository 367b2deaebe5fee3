"""Checks before the first step of a run: device parity, causality, compiled code; and a cache of those that passed."""
