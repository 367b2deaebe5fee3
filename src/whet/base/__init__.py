"""Errors, units, environment variables and the base class of frozen values."""
