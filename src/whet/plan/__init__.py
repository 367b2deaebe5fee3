"""Workload, settings with value, reason, source and evidence, and the rules that decide them; no torch."""
