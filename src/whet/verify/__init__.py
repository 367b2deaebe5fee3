"""Checks of a model and a device: preflight, parity with the CPU, start checks and memory estimates."""
