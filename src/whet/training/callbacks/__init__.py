"""Callbacks that ship with whet: checkpoints, event log, progress, thermal care, health."""
