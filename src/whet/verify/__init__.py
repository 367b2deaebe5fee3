"""Checks of a model and a device: preflight, parity with the CPU, checks before the first step, memory."""
