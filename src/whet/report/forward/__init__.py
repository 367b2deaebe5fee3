"""Forwarding a run to a dashboard: a separate process reads the folder, so that no network can disturb training."""
