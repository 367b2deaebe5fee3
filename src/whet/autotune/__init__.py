"""Measures candidate settings with real optimizer steps and keeps those that finish the run sooner."""
