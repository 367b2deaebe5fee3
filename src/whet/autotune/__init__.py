"""Autotuning: time real optimizer steps, and keep the settings that finish the run sooner."""
