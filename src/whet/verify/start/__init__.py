"""Checks before the first step of a run: device parity, causality and compiled code, with a cache of passed checks."""
