"""Shapes of conversations in files, one file each."""
