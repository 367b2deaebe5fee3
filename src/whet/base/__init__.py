"""Errors, units, environment variables, frozen models and the isolated worker process."""
