"""Forwarding a run to a dashboard from a separate process."""
